"""A worker, or the coordinator, dies in the middle of a long sample, and no generated token is lost.

Real processes, the torch engine, and a scripted learner. The tokens that two workers wrote one after the other are
compared with a full forward pass of the version that their span names, over the whole trajectory. This proves that the
second worker read the tokens of the first one, and that the coordinator joined the two at the right place.
"""

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.client import Coordinator
from echo2d.demo.processes import Programs
from echo2d.demo.run import CONFIG
from echo2d.tasks.sort_digits import write_tokenizer
from tests.support.engine_harness import load_model, save_random_model, score, tiny_config
from tests.support.free_port import free_port
from tests.support.polling import START_S, poll
from tests.support.programs import Site, run

pytestmark = [pytest.mark.timeout(900)]
TOKENS = 480
DYING_TOKENS_PER_S = 60.0  # a sample takes eight seconds; progress comes every two
LOGPROB_ERROR_MAX = 0.05  # bf16 weights, float32 arithmetic in another order


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    base = tmp_path / "base"
    save_random_model(base, tiny_config(), rng_seed=0)
    write_tokenizer(base)
    with Programs(tmp_path / "logs") as programs:
        site = Site(tmp_path, base, programs)
        text = (
            CONFIG.format(**site.facts)
            .replace("= 256", "= 1")
            .replace("group_size = 8", "group_size = 1")
        )
        text = text.replace("max_new_tokens = 12", f"max_new_tokens = {TOKENS}").replace(
            "options = { rng_seed = 0 }\n", ""
        )
        site.config.write_text(text.replace('"sort_digits"', '"tests.support.long_task:LongTask"'))
        yield site


def leases_of(site: Site, group: int) -> list[tuple[int, str, int]]:
    """(attempt, samples, whether it began anew) of each lease that the ledger has for this group."""
    with sqlite3.connect(site.run_dir / "ledger.sqlite") as ledger:
        return ledger.execute(
            "SELECT attempt, samples, base IS NULL FROM leases WHERE group_id = ? ORDER BY attempt",
            (group,),
        ).fetchall()


def has_joined(coordinator: Coordinator, name: str) -> bool:
    return any(row["name"] == name for row in coordinator.status()["workers"])


def serves(coordinator: Coordinator, name: str, version: int) -> bool:
    rows: dict[str, Any] = {row["name"]: row for row in coordinator.status()["workers"]}
    serving = rows[name]["serving"]
    return serving is not None and serving["version"] == version


def snapshots_of(site: Site, count: int) -> list[Path]:
    folders = [site.directory / "snapshots" / str(number) for number in range(count)]
    for number, folder in enumerate(folders):
        save_random_model(folder, tiny_config(), rng_seed=number)
        write_tokenizer(folder)
    return folders


def test_another_worker_continues_a_sample_where_a_killed_worker_stopped(site: Site) -> None:
    coordinator = site.coordinate()
    folders = snapshots_of(site, 2)
    with Coordinator(site.url(), token_file=site.run_dir / "tokens" / "learner.token") as learner:
        # It is there in time, and begins nothing: a sample waits for PARTIAL_WAIT_S, then it begins again.
        site.join("heir", "--threads=1", "--slots=1", "--name=heir")
        dying = site.join(
            "dying", "--threads=1", "--slots=1", f"--set=tokens_per_s_max={DYING_TOKENS_PER_S}"
        )
        poll(lambda: has_joined(learner, "heir"))
        run("worker", "cordon", "heir", f"--run-dir={site.run_dir}")
        learner.open_session(0)
        learner.publish(0, folders[0])
        learner.commit(learner.take_batch(1), t_train_s=1.0)
        poll(lambda: learner.status()["groups"]["tokens_under_way"] > 0)
        os.kill(dying.pid, signal.SIGKILL)
        learner.publish(1, folders[1])
        # Or the heir would begin another group meanwhile.
        poll(lambda: learner.status()["groups"]["leases"] == 0)
        poll(lambda: serves(learner, "heir", 1))
        run("worker", "uncordon", "heir", f"--run-dir={site.run_dir}")
        batch = learner.take_batch(2)
    ((trajectory,),) = [group.trajectories for group in batch.groups]
    old, new = trajectory.spans
    assert [old.start, old.end, new.end] == [0, new.start, TOKENS]
    assert 0 < old.end < TOKENS
    assert (old.version, new.version) == (0, 1)

    prompt, output = batch.groups[0].prompt.tolist(), trajectory.tokens.tolist()
    assert len(output) == len(trajectory.logprobs) == TOKENS
    for span, folder in zip((old, new), folders, strict=True):
        expected = score(load_model(folder), prompt, output, 1.0)[span.start : span.end]
        errors = [
            abs(a - b)
            for a, b in zip(expected, trajectory.logprobs[span.start : span.end], strict=True)
        ]
        assert max(errors) < LOGPROB_ERROR_MAX, f"version {span.version}: {max(errors)}"

    assert site.status()["handed_over"] == {"partials": 1, "tokens": old.end}
    coordinator.terminate()
    assert coordinator.wait(START_S) == 0
    assert leases_of(site, 1) == [(0, json.dumps([0]), 1), (1, json.dumps([0]), 0)]


@pytest.mark.nightly
def test_a_long_sample_survives_a_killed_coordinator(site: Site) -> None:
    """Its worker goes on meanwhile, and finishes it under the attempt that began it."""
    site.fix_port(free_port())
    coordinator = site.coordinate()
    url = site.url()
    (folder,) = snapshots_of(site, 1)
    with Coordinator(url, token_file=site.run_dir / "tokens" / "learner.token") as learner:
        learner.open_session(0)
        learner.publish(0, folder)
        site.join("box", "--threads=1", "--slots=1", f"--set=tokens_per_s_max={DYING_TOKENS_PER_S}")
        poll(lambda: learner.status()["groups"]["tokens_under_way"] > 0)
        os.kill(coordinator.pid, signal.SIGKILL)
        coordinator.wait(START_S)
        again = site.coordinate("again")
        batch = learner.take_batch(1)
    ((trajectory,),) = [group.trajectories for group in batch.groups]
    assert len(trajectory.tokens) == TOKENS
    again.terminate()
    assert again.wait(START_S) == 0
    assert leases_of(site, batch.groups[0].group_id) == [(0, json.dumps([0]), 1)]
