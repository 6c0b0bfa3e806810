"""Checks values in request bodies that are more than one number or text. HttpRefusal: malformed."""

import base64
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from echo2d.client.http import SCORE_MAX, SCORES_MAX
from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.trajectory import StepFigures, TrajectoryScore
from echo2d.core.weights.manifest import Manifest
from echo2d.errors import IntegrityFault
from echo2d.net.http.json_fields import integer, malformed, text

# A learner's identity has the name of its host and a random number.
LEARNER_CHARS_MAX = 128
# The version of echo2d, or the name of another program.
SOFTWARE_CHARS_MAX = 64


def refused_groups(body: Mapping[str, Any]) -> tuple[tuple[GroupId, str], ...]:
    groups, reasons = body["groups"], body["reasons"]
    if (
        not isinstance(groups, list)
        or not isinstance(reasons, list)
        or len(groups) != len(reasons)
        or not groups
    ):
        raise malformed("groups, reasons: expected two lists of the same length, at least 1")
    ids = [GroupId(integer(group, "groups")) for group in groups]
    said = [text(reason, "reasons")[:500] for reason in reasons]
    return tuple(zip(ids, said, strict=True))


def software_name(value: Any) -> str:
    found = text(value, "software")
    if not 0 < len(found) <= SOFTWARE_CHARS_MAX or not found.isprintable():
        raise malformed(f"software: expected 1 to {SOFTWARE_CHARS_MAX} printable characters")
    return found


def learner_identity(value: Any) -> str:
    found = text(value, "learner")
    if len(found) > LEARNER_CHARS_MAX or not found.isprintable():
        raise malformed(f"learner: expected at most {LEARNER_CHARS_MAX} printable characters")
    return found


def manifest_of(value: Any) -> Manifest:
    try:
        return Manifest.decode(base64.b64decode(text(value, "manifest"), validate=True))
    except (ValueError, IntegrityFault) as error:
        raise malformed(f"manifest: expected base64 of a snapshot's manifest: {error}") from error


def scores_of(value: Any) -> tuple[TrajectoryScore, ...]:
    if not isinstance(value, list) or len(value) > SCORES_MAX:
        raise malformed(f"scores: expected a list of at most {SCORES_MAX} scores")
    return tuple(_score(row, f"scores[{at}]") for at, row in enumerate(value))


def figures_of(value: Any) -> StepFigures:
    names = [field.name for field in fields(StepFigures)]
    if not isinstance(value, dict) or not value.keys() <= set(names):
        raise malformed(f"figures: expected an object with any of {', '.join(names)}")
    # The comparison is false for NaN, so NaN is refused, too.
    if not all(type(each) in (int, float) and abs(each) <= SCORE_MAX for each in value.values()):
        raise malformed(f"figures: expected numbers of at most {SCORE_MAX:g}")
    return StepFigures(**{name: float(each) for name, each in value.items()})


def _score(row: Any, name: str) -> TrajectoryScore:
    if not isinstance(row, list) or len(row) != 4:
        raise malformed(f"{name}: expected [group, sample, k, z]")
    group, sample = integer(row[0], name), integer(row[1], name)
    # The comparison is false for NaN, so NaN is refused, too.
    if not all(type(each) in (int, float) and abs(each) <= SCORE_MAX for each in row[2:]):
        raise malformed(f"{name}: expected numbers k and z of at most {SCORE_MAX:g}")
    if row[2] < 0:
        raise malformed(f"{name}: expected k >= 0")
    return TrajectoryScore(group, sample, float(row[2]), float(row[3]))
