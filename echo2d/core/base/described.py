"""Declare a field of the status once: what it means, and under which metric it can be scraped.

`/metrics`, docs/reference/metrics.md and docs/reference/status.md are made from these declarations. Not here: the
fields (`core/status/schema.py`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


def described(
    meaning: str,
    metric: str = "",
    *,
    default: Any = dataclasses.MISSING,
    counter: bool = False,
    label: str = "",
    rows: Mapping[str, str] | None = None,
) -> Any:
    """A field with its meaning, which is also the help text of its metric.

    metric: the field's name in Prometheus, without `_total`; empty: it has none. counter: it only grows. label: the
    metric label for the keys of a mapping. rows: for a list of records, the field that gives each metric label.
    """
    metadata = {"meaning": meaning, "metric": metric, "counter": counter, "label": label}
    return dataclasses.field(default=default, metadata={**metadata, "rows": dict(rows or {})})
