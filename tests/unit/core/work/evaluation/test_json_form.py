"""An evaluation as JSON: every number, and null where there is none."""

import json
import math

from echo2d.client import Evaluation
from echo2d.core.base.ids import Digest, Version
from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.work.evaluation.events import Evaluated, PassAt
from echo2d.core.work.evaluation.json_form import evaluated_json

FOUND = Evaluated(
    3, "held", Version(7), Digest(b"\1" * 32), 2, 3, 4, 0.5, math.nan,
    (PassAt(1, 0.5), PassAt(2, 1.0)), (RewardPart("form", 0.25),), 0.125, 9.0, 1.5,
)  # fmt: skip


def test_the_client_can_read_the_coordinators_json() -> None:
    facts = json.loads(json.dumps(evaluated_json(FOUND), allow_nan=False))
    assert Evaluation(**facts) == Evaluation(
        3, "held", 7, "01" * 32, 2, 3, 4, 0.5, None, {"1": 0.5, "2": 1.0}, {"form": 0.25}, 0.125, 9.0, 1.5
    )  # fmt: skip
