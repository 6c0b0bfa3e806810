"""A fleet of scripted workers in virtual time: the leases of a newcomer with many slots, fast or seemingly fast."""

import random
from dataclasses import replace

from echo2d.core.base.ids import Digest, RequestId, Version
from echo2d.core.coordinator.events import CommitAsked, DeadlinePassed
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    HeldLease,
    LeaseProgress,
    SampleDelta,
    SampleFinished,
    VersionKey,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.core.rules.run import RunRules
from echo2d_lab.standins.memory_run import FakePeer, MemoryRun
from tests.support.coordinator_world import RULES, version_key, with_room

TOKEN_S, TOKENS, REPORT_S = 0.4, 50, 2.0  # of a worker; an answer has TOKENS on average
JOINS_S, SLOTS = 30.0, 512


class Fleet(MemoryRun):
    """Its workers write each sample at one pace, and report like real ones. tokens: that each wrote, by name.

    token_s: of those that write at another pace than TOKEN_S.
    """

    def __init__(self, rules: RunRules) -> None:
        super().__init__(rules)
        self._random = random.Random(3)
        # By sample of a lease: its first moment, its tokens, how many of them are told, and the version that writes it.
        self._samples: dict[tuple[HeldLease, int], tuple[float, int, int, VersionKey]] = {}
        self._asked: RequestId | None = None
        self._step = 0
        self.tokens: dict[str, int] = {}
        self.token_s: dict[str, float] = {}
        self.connect("seed", kind="seed", slots=0)
        self.open_session()
        self.publish_key(version_key(0))
        self.drain()

    def join(self, name: str, slots: int) -> None:
        worker = self.connect(name, slots=slots)
        self.drain()
        self.refit(worker)

    def go_on(self, until: float) -> None:
        while self.now < until:
            wake_at = self.state.wake_at()
            if wake_at is not None and wake_at <= self.now:
                self.handle(DeadlinePassed())
            for number, peer in enumerate(tuple(self.peers.values())):
                self.drain()
                self.refit(peer)
                if (self.now + number / 2) % REPORT_S == 0:
                    self._report(peer)
            self._train()
            self.now += 0.5

    def _report(self, worker: FakePeer) -> None:
        self.say(worker, Heartbeat(len(worker.open)))
        for key, sample in tuple(worker.open):
            assert worker.serving is not None
            length = self._random.randint(TOKENS // 2, 3 * TOKENS // 2)
            begun, length, told, by = self._samples.get(
                (key, sample), (self.now, length, 0, worker.serving)
            )
            written = min(length, int((self.now - begun) / self.token_s.get(worker.name, TOKEN_S)))
            self._samples[key, sample] = begun, length, written, by
            self.tokens[worker.name] = self.tokens.get(worker.name, 0) + written - told
            at = 0 if written == length else told
            span = VersionSpan(at, written, by.version, by.digest)
            wrote = pack_tokens([3] * (written - at - 1) + [1 if at == 0 else 3])
            logprobs = pack_logprobs([-0.5] * (written - at))
            if written == length:
                worker.open.remove((key, sample))
                result = SampleFinished(*key, sample, wrote, logprobs, (span,), "stop")
                worker.unanswered[key, sample] = result
                self.say(worker, result)
            elif written > told:
                wrote = pack_tokens([3] * (written - at))
                delta = SampleDelta(sample, wrote, logprobs, (span,))
                self.say(worker, LeaseProgress(*key, (delta,)))
            else:
                self.say(worker, LeaseProgress(*key, ()))

    def _train(self) -> None:
        """As soon as a batch is there."""
        while True:
            self._asked = self._asked or self.ask_batch(self._step + 1)
            self.drain()
            batch = self.replies.get(self._asked)
            if batch is None or batch.digest is None:
                return
            self._step, self._asked = self._step + 1, None
            self._commit(batch.digest)
            self.publish_key(version_key(Version(self._step)))

    def _commit(self, digest: Digest) -> None:
        epoch, step = self.ledger.epoch, self._step
        self.call(lambda number: CommitAsked(number, epoch, step, digest, 0.2, ()))


def test_a_fast_newcomer_with_many_slots_has_full_work_within_a_minute() -> None:
    """90 % of what it writes later; R is as large as its slots."""
    rules = with_room(RULES, 2 * TOKENS)
    fleet = Fleet(
        replace(
            rules,
            trajectories_per_step=SLOTS,
            group_size=8,
            group_min=8,
            filter_zero_variance=False,
        )
    )
    fleet.join("a", 64)
    fleet.join("b", 64)
    fleet.go_on(JOINS_S)
    fleet.join("new", SLOTS)
    wrote = []
    for after_s in (30.0, 40.0, 60.0, 80.0):
        fleet.go_on(JOINS_S + after_s)
        wrote.append(fleet.tokens["new"])
    facts = {worker.name: worker for worker in fleet.state.status(now=fleet.now).workers}
    assert facts["new"].usable == SLOTS
    assert facts["new"].leased > 0.95 * SLOTS
    early, late = (wrote[1] - wrote[0]) / 10.0, (wrote[3] - wrote[2]) / 20.0
    assert early > 0.9 * late > 0.8 * SLOTS / TOKEN_S * 0.9


def test_a_newcomer_that_was_fast_for_a_moment_keeps_nothing_from_the_others() -> None:
    """Its tokens are made up, so all others look slow beside it; then it writes nothing any more."""
    rules = with_room(RULES, 2 * TOKENS)
    rules = replace(rules, trajectories_per_step=64, group_size=8, group_min=8)
    fleet = Fleet(replace(rules, filter_zero_variance=False))
    fleet.join("a", 48)
    fleet.join("b", 48)
    fleet.go_on(JOINS_S)
    fleet.token_s["new"] = 0.001
    fleet.join("new", 4096)
    fleet.go_on(JOINS_S + 10.0)
    assert fleet.tokens["new"] > fleet.tokens["a"]
    fleet.token_s["new"] = 1e9
    wrote = []
    for after_s in (60.0, 120.0):
        fleet.go_on(JOINS_S + after_s)
        wrote.append(fleet.tokens["a"] + fleet.tokens["b"])
    assert (wrote[1] - wrote[0]) / 60.0 > 0.8 * 96 / TOKEN_S
    held = {worker.name: worker.leased for worker in fleet.state.status(now=fleet.now).workers}
    assert held["new"] < 8 < held["a"]
