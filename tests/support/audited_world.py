"""A coordinator with an audit, whose auditor sees what liars write."""

from dataclasses import replace
from typing import Any

from echo2d.core.audit.audits import Audits
from echo2d.core.audit.events import AuditTold, Convict, LimitsLearnt
from echo2d.core.audit.scoring_queue import SCORING_PATIENCE_S
from echo2d.core.base.ids import PeerId
from echo2d.core.coordinator.events import CoordinatorAction, CoordinatorEvent
from echo2d.core.protocol.control_messages import (
    AnswerToScore,
    HeldLease,
    SampleFinished,
    ToCoordinator,
    VersionSpan,
)
from echo2d.core.protocol.evidence import TOLERANCES, Evidence
from echo2d.core.rules.audit import AuditRules
from echo2d.core.rules.tasks import EpisodeRules, GatewayRules
from echo2d.core.work.events import SampleReturned
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, publish_step, rules, version_key
from tests.support.gateway import IDLE, WAIT_S

LIE = (9, 9, 1)  # what liars write; honest workers of a `MemoryRun` write (3, x, 1)
MIXED_K = 0.6  # nats
INT8_K = 0.3
INT8_LOGPROB = b"\0\0\0\xc0"  # -2.0, which marks answers of workers in int8
LEARNT = LimitsLearnt("torch", 0.1, 0.002, 0, 0.05)


class AuditedWorld(World):
    """A world whose auditor recognises lies, unless it is away. It measures INT8_K for answers of workers with
    quantized weights.

    told: the results of audits. mixes: workers that refit in place: each of their answers begins under the version
    before, and the auditor measures MIXED_K for the rest. episodes: the task is an environment. calls: the gateway is
    on, and the run itself needs one slot. versions_held: if workers hold several versions, there are no tasks. scored:
    the answers that the auditor was ordered to score.
    """

    def __init__(
        self,
        *,
        learnt: bool = True,
        quantized: bool = False,
        episodes: bool = False,
        calls: bool = False,
        versions_held: int = 1,
        **changes: Any,
    ) -> None:
        self.scored: list[AnswerToScore] = []
        self.told: list[AuditTold] = []
        self.convicts: list[Convict] = []
        self.returned: list[SampleReturned] = []
        self.learnt = learnt
        self.liars: set[str] = set()
        self.mixes: set[str] = set()
        audit = AuditRules(**{"newcomer": 3, "share": 0.0, "trusted": ("t",), **changes})
        plenty: dict[str, Any] = {"trajectories_per_step": 8, "filter_zero_variance": False}
        if episodes:
            episode = EpisodeRules(
                tokens_max=64,
                turns_max=16,
            )
            tasks = tuple(replace(task, episode=episode) for task in rules().tasks)
            # One group at a time, so that slots are free.
            plenty |= {"tasks": tasks, "trajectories_per_step": 2, "staleness_max": 0}
        if calls:
            plenty |= {"gateway": GatewayRules(1.0, WAIT_S), **IDLE}
        if versions_held > 1:
            plenty |= {"versions_held": versions_held, "tinker": ("model",), "tasks": ()}
        super().__init__(rules(audit=audit, quantized_workers=quantized, **plenty))

    def _boot(self) -> Any:
        if self.learnt:
            self.ledger.append(LEARNT)
        return super()._boot()

    def _score(self, answer: AnswerToScore) -> Evidence:
        self.scored.append(answer)
        found = super()._score(answer)
        if answer.written and self.mixes:
            found = replace(found, k=MIXED_K)
        if answer.logprobs.startswith(INT8_LOGPROB):
            found = replace(found, k=INT8_K)
        lies = answer.tokens[:4] == b"\x09\0\0\0"
        return replace(found, k=6.0, misses=(found.tokens,) * len(TOLERANCES)) if lies else found

    def say(self, peer: FakePeer, message: ToCoordinator) -> list[CoordinatorAction]:
        if peer.name in self.mixes and isinstance(message, SampleFinished):
            message = _mixed(message)
            peer.unanswered[HeldLease(message.lease, message.attempt), message.sample] = message
        if peer.quantization and isinstance(message, SampleFinished):
            message = replace(message, logprobs=INT8_LOGPROB * (len(message.logprobs) // 4))
            peer.unanswered[HeldLease(message.lease, message.attempt), message.sample] = message
        return super().say(peer, message)

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        actions = super().handle(event)
        self.told += [each for each in actions if isinstance(each, AuditTold)]
        self.convicts += [each for each in actions if isinstance(each, Convict)]
        return actions

    def _persist(self, record: Any) -> None:
        super()._persist(record)
        if isinstance(record, SampleReturned):
            self.returned.append(record)

    @property
    def audits(self) -> Audits:
        audits = self.state._audits
        assert audits is not None
        return audits

    def standing(self, name: str) -> str:
        return self.audits.standing(PeerId(name))

    def step_workers(self) -> bool:
        lied = [self.refit(self.peers[name]) + self.lie(name) for name in self.liars]
        return super().step_workers() or any(lied)

    def lie(self, name: str) -> bool:
        """Finish all of this worker's samples with made-up tokens. Returns whether it had any."""
        peer = self.peers[name]
        said = 0
        while peer.open and not peer.closed:
            key, sample = peer.open[0]
            self.say(peer, peer.finish(key, sample, tokens=LIE))
            said += 1
        return said > 0


def _mixed(result: SampleFinished) -> SampleFinished:
    """The same result, except that the version before, if there is one, wrote its first token."""
    (span,) = result.spans
    if not span.version:
        return result
    old = version_key(span.version - 1)
    spans = (VersionSpan(0, 1, old.version, old.digest), span._replace(start=1))
    return replace(result, spans=spans)


def started(*names: str, auditor: bool = True, **changes: Any) -> AuditedWorld:
    """A world in which these workers serve version 0. "mine" and "mine-int8" are trusted; workers whose names end in
    "int8" compute in int8.
    """
    world = AuditedWorld(**changes)
    world.connect("seed", kind="seed", slots=0)
    if auditor:
        world.connect("auditor", kind="auditor", slots=0)
    for name in names:
        world.connect(
            name,
            trusted=name in ("mine", "mine-int8"),
            quantization="int8" if name.endswith("int8") else "",
        )
    world.open_session()
    world.publish(0)
    while world.pending or any(world.refit(peer) for peer in world.peers.values()):
        world.drain()
    return world


def train_on(world: AuditedWorld, steps: int) -> None:
    done = world.state.status().committed_step
    for step in range(done + 1, done + steps + 1):
        world.now += 2 * SCORING_PATIENCE_S
        publish_step(world, step)


def trajectories(world: AuditedWorld) -> list[Any]:
    stored = world.ledger.groups.values()
    return [each for group in stored for each in group.record.trajectories]
