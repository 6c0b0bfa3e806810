"""Fixtures of tests of the laboratory."""

from tests.support.lab import make_lab

__all__ = ["make_lab"]
