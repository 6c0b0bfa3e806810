"""On-policy distillation by real programs: a coordinator, a worker with the torch engine, and a learner with a teacher.

The pupil is hardly trained, so all its rewards are 0, and the teacher is the demo's model.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from echo2d.demo.processes import Programs
from echo2d.demo.results import read_rows
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from tests.support.polling import START_S
from tests.support.programs import Site

pytestmark = [pytest.mark.timeout(900)]
STEPS = 25


def test_a_pupil_without_rewards_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    teacher = make_tiny_model(Path.home() / ".cache" / "echo2d")
    pupil = make_tiny_model(tmp_path / "pupil", TinyRecipe(accuracy_stop=0.0, batch=8, layers=1))
    options = [
        f"--set=learner.teacher={json.dumps(str(teacher))}",
        '--set=learner.objective="distill"',
        "--set=learner.lr=2e-3",
    ]
    with Programs(tmp_path / "logs") as programs:
        (tmp_path / "refused").mkdir()
        site = Site(tmp_path / "refused", pupil, programs)
        site.coordinate("filtering")
        site.url()
        refused = site.learn(1, *options)
        assert refused.wait(START_S) == 2
        assert "policy.filter_zero_variance: expected false" in refused.log.read_text()
    with Programs(tmp_path / "logs") as programs:
        site = Site(tmp_path, pupil, programs)
        text = site.config.read_text()
        site.config.write_text(text.replace("[policy]", "[policy]\nfilter_zero_variance = false"))
        site.coordinate()
        site.join("box", "--threads=1")
        assert site.learn(STEPS, *options).wait(2 * START_S) == 0
    rows = read_rows(tmp_path / "learner" / "metrics.jsonl")
    distances = [row["kl_teacher"] for row in rows]
    print([f"{each:.2f}" for each in distances])  # noqa: T201
    assert np.mean(distances[-5:]) < 0.8 * np.mean(distances[:5])
    assert max(row["reward_mean"] for row in rows) < 0.1
