"""Fixtures of tests of whole runs."""

from tests.support.programs import site

__all__ = ["site"]
