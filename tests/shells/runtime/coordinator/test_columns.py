"""The whole way of columns and attachments: engine, worker, real sockets, ledger, the learner's trajectory.

A worker is killed in the middle of an answer and another one continues it; then the coordinator is restarted before the
learner has fetched anything.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo2d.client import AsyncCoordinator, Attachment, PeerFault, Trajectory
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.canonical import digest_of
from echo2d.core.coordinator.events import Recovered
from echo2d.core.protocol.control_messages import PROGRESS_S
from echo2d.core.rules.run import RunRules
from echo2d.engines.fake import FakePolicy
from echo2d.runtime.coordinator.loop import Machine
from echo2d.runtime.coordinator.main import Opened, core_machine, open_coordinator
from echo2d.runtime.seed.main import Seed
from tests.support.attached_task import SHARED
from tests.support.column_engine import ColumnEngine, experts_of
from tests.support.control_link import worker_token
from tests.support.free_port import free_port
from tests.support.live_run import HEARTBEAT_S, LOOK_S, Facts, config_of_run
from tests.support.peer import a_worker
from tests.support.polling import HANG_S
from tests.support.snapshots import write_snapshot

TOKENS = 64
TOKENS_PER_S = 16.0  # of the first worker: it has reported half of its answer when it dies


class Site:
    """A coordinator that may be started again at the same address."""

    def __init__(self, folder: Path, config: CoordinatorConfig) -> None:
        self.folder, self._config = folder, config
        self.url = ""
        self.opened: Opened | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with (
            open_coordinator(self._config, make_machine=_impatient) as opened,
            asyncio.TaskGroup() as tasks,
        ):
            self.opened, self.url = opened, opened.url
            serving = tasks.create_task(opened.coordinator.serve())
            seed = await asyncio.to_thread(Seed, opened.seed)
            seeding = tasks.create_task(seed.run())
            try:
                yield
            finally:
                seeding.cancel()
                opened.coordinator.stop("the test ends it")
                await serving

    def token(self, path: Path, name: str) -> Path:
        assert self.opened is not None
        worker_token(self.opened.run.path, self.url, name, out=path)
        return path

    def learner(self) -> AsyncCoordinator:
        token = self.folder / "run" / "tokens" / "learner.token"
        return AsyncCoordinator(self.url, token_file=token, timeout_s=HANG_S)

    async def until(self, holds: Callable[[Facts], bool]) -> Facts:
        assert self.opened is not None
        async with asyncio.timeout(HANG_S):
            while True:
                if holds(facts := self.opened.coordinator.status()):
                    return facts
                await asyncio.sleep(LOOK_S)


def _impatient(rules: RunRules, recovered: Recovered) -> Machine:
    quick = replace(rules, heartbeat_s=HEARTBEAT_S, lease_silence_s=2 * PROGRESS_S)
    return core_machine(quick, recovered)


def a_site(folder: Path) -> Site:
    changes = {
        "coordinator.port": free_port(),
        "policy.trajectories_per_step": 2,
        "policy.staleness_max": 0,  # only the two groups of the first step begin
        "policy.columns": ("experts", "half"),
        "sampling.max_new_tokens": TOKENS,
        "task.kind": "tests.support.attached_task:AttachedTask",
        "task.options": {},
    }
    return Site(folder, config_of_run(folder, {}, **changes))


def engine(tokens_per_s: float | None) -> ColumnEngine:
    return ColumnEngine(
        FakePolicy(answer_tokens=(TOKENS, TOKENS)), tokens_per_s=tokens_per_s, slots=1
    )


def require_columns(trajectory: Trajectory) -> None:
    """Each token has its own numbers, whoever wrote it."""
    columns = trajectory.columns
    assert set(columns) == {"experts", "half"}
    assert columns["experts"].dtype == np.uint16
    assert np.array_equal(columns["experts"], experts_of(trajectory.tokens))
    assert np.array_equal(columns["half"], (trajectory.tokens / 2).astype(np.float16))


async def test_columns_and_attachments_reach_the_learner_despite_kills_and_a_restart(
    tmp_path: Path,
) -> None:
    site = a_site(tmp_path)
    async with AsyncExitStack() as stack:
        async with site.serving():
            learner = await stack.enter_async_context(site.learner())
            await learner.open_session(0)
            await learner.publish(
                0, await asyncio.to_thread(write_snapshot, tmp_path / "out" / "0")
            )
            async with a_worker(site, tmp_path / "dying", engine(TOKENS_PER_S), slots=1):
                await site.until(lambda facts: facts["groups"]["tokens_under_way"] > 0)
            heir = a_worker(site, tmp_path / "heir", engine(8 * TOKENS_PER_S), slots=1)
            await stack.enter_async_context(heir)
            await site.until(lambda facts: facts["handed_over"]["partials"] == 1)
            await site.until(lambda facts: sum(each["accepted"] for each in facts["workers"]) >= 1)
        async with site.serving():
            batch = await learner.take_batch(1)
            trajectories = [each for group in batch.groups for each in group.trajectories]
            for trajectory in trajectories:
                assert len(trajectory.tokens) == TOKENS
                require_columns(trajectory)
            assert [len(each.spans) for each in trajectories] == [2, 1]
            await fetched(learner, trajectories)
            await learner.commit(batch, t_train_s=0.1)
            await learner.checkpoint(1)
            await gone(learner, trajectories[0].attachments[1])


async def fetched(learner: AsyncCoordinator, trajectories: list[Trajectory]) -> None:
    """The learner gets each attachment, and nothing that no trajectory names."""
    for trajectory in trajectories:
        legend, picture = trajectory.attachments
        assert (legend.name, picture.name) == ("legend", "picture")
        assert await learner.attachment(legend) == SHARED
        number = trajectory.row.removeprefix("row ")
        assert await learner.attachment(picture) == f"bytes of {number}".encode()
    unknown = Attachment("picture", digest_of(b"never attached"), 1)
    with pytest.raises(
        PeerFault, match=r"attachment: attachment [0-9a-f]{16}: no group that is kept"
    ):
        await learner.attachment(unknown)
    for hostile in ("..", "zz", "ab" * 33, "%2e%2e%2frun"):
        with pytest.raises(PeerFault, match=r"malformed: digest: expected 32 bytes in hex|http:"):
            await learner._api.repeat("GET", f"/v1/attachments/{hostile}", None)


async def gone(learner: AsyncCoordinator, attachment: Attachment) -> None:
    """Until the groups of a checkpoint are trimmed."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                await learner.attachment(attachment)
            except PeerFault:
                return
            await asyncio.sleep(LOOK_S)
