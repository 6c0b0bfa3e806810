"""`echo2d envs` plays environments of verifiers, unmodified, while their policy changes.

The test is the learner: it checks every trajectory, and publishes a changed policy after each batch. The coordinator's
record of an episode must equal verifiers' trace, because otherwise it refuses the end.
"""

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from echo2d.client import Coordinator, Trajectory
from examples.own_loop import publish
from tests.support.free_port import free_port
from tests.support.paths import REPO
from tests.support.polling import START_S, poll
from tests.support.programs import Site
from tests.support.verifiers_site import (
    CLASSIC_RENDERERS,
    EPISODES,
    INTERPRETERS,
    gateway_token,
    serves,
    write_chat_model,
)

PACKAGES = Path(__file__).parent / "packages"
TURNS = 4
ROWS = 12
AT_ONCE = 12
LOCAL = json.dumps({"agent": {"runtime": {"type": "subprocess"}}})
KINDS = [
    pytest.param(interpreter, kind, id=f"{Path(interpreter).parts[-3]}-{kind}")
    for interpreter in INTERPRETERS
    for kind in ("taskset", "classic")
    if kind == "taskset" or "0.4" not in interpreter  # 0.4 has no classic ones
]
log = logging.getLogger(__name__)


@pytest.mark.skipif(not INTERPRETERS, reason="no verifiers here: `make nightly-envs` installs it")
@pytest.mark.parametrize(("interpreter", "kind"), KINDS or [("", "")])
def test_episodes_of_unmodified_environments_are_trained_on(
    site: Site, interpreter: str, kind: str
) -> None:
    run = EnvsRun(site, interpreter, kind, silence_s=120.0)
    with run.learning() as learner, run.playing("player") as totals:
        began = time.monotonic()
        learner.learn(EPISODES)
        seconds = time.monotonic() - began
    log.info(
        "%s, %s: %d episodes of %d turns trained in %.0f s, %d versions published meanwhile, "
        "%d episodes with several versions; %s",
        Path(interpreter).parts[-3], kind, learner.episodes, TURNS, seconds, learner.step,
        learner.several, totals,
    )  # fmt: skip
    assert totals["episodes"] >= EPISODES
    assert totals["refused"] == 0
    # Those that ran when it was stopped.
    assert totals["dropped"] <= AT_ONCE
    assert learner.several, "no refit came while an episode was played"


@pytest.mark.skipif(not INTERPRETERS, reason="no verifiers here: `make nightly-envs` installs it")
@pytest.mark.parametrize("interpreter", INTERPRETERS or [""])
def test_a_killed_player_loses_only_its_running_episodes(site: Site, interpreter: str) -> None:
    run = EnvsRun(site, interpreter, "taskset", silence_s=3.0)
    with run.learning() as learner:
        first = run.start("first")
        learner.learn(AT_ONCE)
        first.kill()
        first.wait()
        with run.playing("second") as totals:
            learner.learn(5 * AT_ONCE)
    assert totals["refused"] == 0
    assert totals["episodes"] >= 3 * AT_ONCE


@pytest.mark.skipif(not INTERPRETERS, reason="no verifiers here: `make nightly-envs` installs it")
@pytest.mark.parametrize("interpreter", INTERPRETERS or [""])
def test_running_episodes_survive_a_killed_coordinator(site: Site, interpreter: str) -> None:
    run = EnvsRun(site, interpreter, "taskset", silence_s=120.0)
    with run.learning() as learner, run.playing("player") as totals:
        learner.learn(2 * AT_ONCE)
        run.coordinator.kill()
        run.coordinator = site.coordinate("coordinator-again")
        learner.learn(6 * AT_ONCE)
    assert totals["refused"] == 0
    # Those that ran when it was stopped, and those that had made no turn when the coordinator was killed.
    assert totals["dropped"] <= 2 * AT_ONCE
    assert totals["episodes"] >= 6 * AT_ONCE


class EnvsRun:
    """A run whose episodes are played by `echo2d envs`."""

    def __init__(self, site: Site, interpreter: str, kind: str, *, silence_s: float) -> None:
        self._site, self._interpreter, self._kind = site, interpreter, kind
        self.model = write_chat_model(site.directory / "model")
        self._configure(silence_s)
        self.coordinator = site.coordinate()
        site.join("box", "--threads=1", f"--slots={AT_ONCE}", f"--base-model={self.model}")
        self._token = gateway_token(site, "agent")

    def _configure(self, silence_s: float) -> None:
        # The model has no chat template: verifiers makes the tokens.
        words = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        opening = words.token_to_id("<|im_start|>")
        options = f"rows = {ROWS}, silence_s = {silence_s}, opening = [{opening}]"
        text = self._site.config.read_text()
        for old, new in (
            (str(self._site.facts["model"]), str(self.model)),
            # The same one after a restart.
            ("port = 0", f"port = {free_port()}\n\n[link]\nport = 0"),
            ("staleness_max = 1", "staleness_max = 3"),
            ("trajectories_per_step = 32", "trajectories_per_step = 8"),
            ("group_size = 8", "group_size = 4"),
            ('kind = "sort_digits"', 'kind = "agents"'),
            ("options = { rng_seed = 0 }", f"options = {{ {options} }}"),
            ("max_new_tokens = 12", "max_new_tokens = 24"),
        ):
            assert old in text
            text = text.replace(old, new)
        self._site.config.write_text(f"{text}\n[gateway]\nenabled = true\n")

    @contextmanager
    def learning(self) -> Iterator["CheckingLearner"]:
        token = self._site.run_dir / "tokens" / "learner.token"
        poll(token.exists)
        with Coordinator(self._site.url(), token_file=token) as coordinator:
            coordinator.open_session(resume_step=0)
            learner = CheckingLearner(coordinator, self.model, self._site.directory / "snapshots")
            poll(lambda: serves(self._site))
            yield learner

    def start(self, name: str) -> subprocess.Popen[bytes]:
        python_path = [str(REPO), str(PACKAGES)]
        if self._kind == "classic":
            python_path.insert(0, str(CLASSIC_RENDERERS))
        command = [
            self._interpreter, "-m", "echo2d", "envs", f"counting_{self._kind}", "--json",
            f"--gateway={self._site.url()}", f"--secret={self._token}", f"--tokenizer={self.model}",
            '--renderer={"name": "qwen3", "enable_thinking": false}',
            f"--episodes-at-once={AT_ONCE}",
            f"--env-args={LOCAL if self._kind == 'taskset' else '{}'}",
        ]  # fmt: skip
        with self._out(name).open("w") as out, self._log(name).open("w") as errors:
            return subprocess.Popen(
                command,
                cwd=self._site.directory,
                env={**os.environ, "PYTHONPATH": ":".join(python_path)},
                stdout=out,
                stderr=errors,
            )

    @contextmanager
    def playing(self, name: str) -> Iterator[dict[str, Any]]:
        """A player that is stopped in order. Once the context has ended, its last totals are there."""
        totals = dict[str, Any]()
        player = self.start(name)
        try:
            yield totals
            assert player.poll() is None, self._log(name).read_text()
            player.send_signal(signal.SIGTERM)
            assert player.wait(START_S) == 0, self._log(name).read_text()
        finally:
            player.kill()
            player.wait()
        totals |= json.loads(self._out(name).read_text().splitlines()[-1])
        failed = [
            line for line in self._log(name).read_text().splitlines() if " failed task=" in line
        ]
        # To classic verifiers an answer of no words is an error, and a random policy writes some.
        expected = ["was stopped", *["EmptyModelResponseError"] * (self._kind == "classic")]
        assert [line for line in failed if not any(each in line for each in expected)] == []

    def _out(self, name: str) -> Path:
        return self._site.directory / f"{name}.out"

    def _log(self, name: str) -> Path:
        return self._site.directory / f"{name}.log"


class CheckingLearner:
    """A learner that looks at each trajectory, and publishes a changed policy after each batch.

    several: trajectories that several versions wrote.
    """

    def __init__(self, coordinator: Coordinator, model: Path, root: Path) -> None:
        self._coordinator, self._model, self._root = coordinator, model, root
        self._policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.step = self.episodes = self.several = 0
        publish(coordinator, self._policy, model, root, 0)

    def learn(self, episodes: int) -> None:
        """Until so many episodes were trained on, since the start."""
        while self.episodes < episodes:
            batch = self._coordinator.take_batch(self.step + 1)
            versions = [checked(each) for group in batch.groups for each in group.trajectories]
            self._coordinator.commit(batch, t_train_s=0.1)
            self.step += 1
            self.episodes += len(versions)
            self.several += sum(len(each) > 1 for each in versions)
            change(self._policy)
            publish(self._coordinator, self._policy, self._model, self._root, self.step)


def checked(trajectory: Trajectory) -> set[int]:
    """The versions that wrote it. Every written token has one span, and the rest has none."""
    counts = np.zeros(len(trajectory.tokens), dtype=np.int32)
    for span in trajectory.spans:
        counts[span.start : span.end] += 1
    assert np.array_equal(counts, trajectory.written.astype(np.int32))
    assert (trajectory.turns, trajectory.branch) == (TURNS, 0)
    assert 0.0 <= trajectory.reward <= 1.0
    assert trajectory.reward_parts["even"] == pytest.approx(trajectory.reward)
    return {span.version for span in trajectory.spans}


def change(policy: Any) -> None:
    """What a train step would do, without its costs."""
    with torch.no_grad():
        for each in policy.parameters():
            each.add_(torch.randn_like(each), alpha=0.01)
