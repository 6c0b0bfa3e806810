"""What tests of whole runs share."""

from tests.support.programs import site

__all__ = ["site"]
