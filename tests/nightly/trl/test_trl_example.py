"""TRL's GRPOTrainer with the data of a real coordinator and worker."""

import ast
import subprocess

import pytest

from tests.support.paths import REPO, TRL_ENVIRONMENT
from tests.support.polling import poll
from tests.support.programs import Site

STEPS = 6
TRAIN_S = 1200.0


def test_the_trainer_of_trl_trains_on_batches_of_the_coordinator(site: Site) -> None:
    # TRL trains whole groups.
    text = site.config.read_text()
    site.config.write_text(text.replace("group_size = 8", "group_size = 8\ngroup_min = 8"))
    site.coordinate()
    site.join("box", "--threads=1")
    token = site.run_dir / "tokens" / "learner.token"
    arguments = [site.url(), token, site.facts["model"], site.directory / "snapshots", STEPS]
    command = [TRL_ENVIRONMENT / "venv" / "bin" / "python", "-m", "examples.trl_grpo", *arguments]
    ended = subprocess.run(
        list(map(str, command)),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=TRAIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = [
        ast.literal_eval(line) for line in ended.stdout.splitlines() if line.startswith("{'loss'")
    ]
    assert len(rows) == STEPS, ended.stdout
    assert any(float(row["clip_ratio/region_mean"]) for row in rows)  # old data are known to be old
    rewards = [float(row["reward"]) for row in rows]
    poll(lambda: site.serving() == STEPS)
    facts = site.status()
    assert (facts["committed_step"], facts["versions_published"]) == (STEPS, STEPS + 1)
    assert facts["rewards"] == [
        [step, pytest.approx(reward, abs=1e-3)] for step, reward in enumerate(rewards, 1)
    ]
