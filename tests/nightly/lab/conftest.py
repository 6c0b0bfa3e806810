"""What tests of the laboratory share."""

from tests.support.lab import make_lab

__all__ = ["make_lab"]
