"""Which settings a learner trained with, so that one that goes on with others says so."""

import dataclasses
import json
import logging
from pathlib import Path

from echo2d.learner.config import LearnerConfig

SETTINGS_FILE = "settings.json"  # in learner.out_dir

log = logging.getLogger("echo2d.learner")


def tell_changes(config: LearnerConfig) -> None:
    """Log each key of [learner] that differs from the last start's, and keep the present ones. Blocking."""
    path = config.out_dir / SETTINGS_FILE
    now = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    for key, then in _kept(path).items():
        if key in now and now[key] != then:
            log.warning("changed key=learner.%s before=%r now=%r", key, then, now[key])
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(now, indent=1))
        part.replace(path)
    except OSError as error:
        log.warning("the next start cannot say what has changed: %s: %s", path, error.strerror)


def _kept(path: Path) -> dict[str, object]:
    """Those of the last start; empty: there was none, or its file is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
