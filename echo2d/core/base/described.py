"""Declares a field of the status once: what it means, and under which metric it can be scraped.

`/metrics`, docs/reference/metrics.md and docs/reference/status.md are made of these declarations. Not here: the fields
(`core/status/schema.py`).
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
    """A field. meaning: also the help text of the metric.

    metric: its name in Prometheus, without `_total`; empty: it has none. counter: it only grows. label: of a mapping's
    keys. rows: of records, by label the field that tells them apart.
    """
    metadata = {"meaning": meaning, "metric": metric, "counter": counter, "label": label}
    return dataclasses.field(default=default, metadata={**metadata, "rows": dict(rows or {})})
