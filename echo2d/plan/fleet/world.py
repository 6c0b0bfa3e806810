"""Simulates a fleet, a learner and their coordinator for hours of virtual time; `echo2d simulate` runs it.

These parts are the real code of `core`: membership, leases, granting, groups, the gates and batches of staleness,
estimators, capacity, activation. The rest is simplified. A broadcast is one prediction of the planner, and all workers
get the version when it ends. Progress and heartbeats are not sent as messages; a worker that falls silent is given up
after SILENCE_S. Grants are made at intervals. The kinds of workers that pass versions on are those that `plan` would
choose. Workers on standby receive versions, pass them on like others of their kind, and cost nothing. The same rng_seed
gives the same run. Not here: what one box does (`worker`), how a version reaches the workers (`versions`), frames and
faults on the way (`plan/broadcast/world`, and `faults/world` of echo2d-lab).
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import GroupId, PeerId, PublishSeq, RunId, SessionId
from echo2d.core.capacity.bottleneck import BUSY
from echo2d.core.capacity.demand import Assumptions, Candidate, CapacityPlanner
from echo2d.core.capacity.estimators import quantile
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.capacity.model import Demand, judge, mu_min
from echo2d.core.cluster.events import Note, PeerConnected, Persist, Send, StopRun
from echo2d.core.cluster.membership import PEERS_MAX, Membership
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.coordinator.events import CoordinatorAction, Recovered
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    HeldLease,
    Hello,
    LeaseCancelled,
    LeaseGranted,
    ToPeer,
    VersionKey,
)
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.rules.prices import Price
from echo2d.core.rules.run import ActivationTable, DisseminationTable, RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.events import (
    DrawPrompt,
    EpisodeEnded,
    GroupDropped,
    LeaseGiven,
    PromptDrawn,
    PromptTaken,
    SampleScored,
    ScoreSample,
    StepEnvironment,
)
from echo2d.core.work.scheduler import LeaseScheduler
from echo2d.core.work.training.groups import Groups
from echo2d.core.work.training.staleness import PREFETCH_STEPS, Staleness
from echo2d.core.work.training.stragglers import JUDGED_SHARE
from echo2d.errors import Fault, OperatorFault
from echo2d.plan.fleet.forecast import Ablation, provision
from echo2d.plan.fleet.known_deliveries import KnownDeliveries
from echo2d.plan.fleet.learner import FleetLearner
from echo2d.plan.fleet.spec import FleetSpec, WorkersTable
from echo2d.plan.fleet.tools import FleetTools, ToolAnswer
from echo2d.plan.fleet.versions import FleetVersions
from echo2d.plan.fleet.worker import PLANNED_TOKENS_MAX, STOP, FleetSample, FleetWorker
from echo2d.plan.kernel.virtual_clock import Clock

# Grants are this share of a sample's time apart, at most ADVANCE_S_MAX. A slot is empty for half of that on average.
ADVANCE_SHARE = 0.01
ADVANCE_S_MAX = 1.0
# The run ends if nothing is trained for the time of STANDS_STEPS planned steps. LOOKS looks divide that time.
STANDS_STEPS, LOOKS = 10, 2
SILENCE_S = 15.0  # A worker that is silent for this long is given up, as in a run.
FOREVER_S = 1e12
GROUP_QUANTILES = {"p50": 0.5, "p95": 0.95}
NOTED = (PromptTaken, GroupDropped, LeaseGiven)
WORKS_MAX = 1 << 17  # samples whose length is remembered
_CHECK_EVERY = 2000  # grants between two checks of the machines


def _rules(fleet: FleetSpec, ablation: Ablation, tools: FleetTools) -> RunRules:
    """The rules of the simulated run. No lease or heartbeat times out, because `FleetWorld.lose` decides which worker
    is lost.
    """
    learner, policy = fleet.learner, fleet.policy
    task = TaskRules(max_new_tokens=PLANNED_TOKENS_MAX, stop_token_ids=(STOP,), episode=tools.rules)
    return RunRules(
        run_id=RunId("fleet"),
        staleness_max=learner.staleness_max,
        publish_every=learner.publish_every,
        trajectories_per_step=learner.trajectories_per_step,
        group_size=fleet.simulate.group_size,
        move_stragglers=policy.move_stragglers,
        group_patience=policy.group_patience,
        tasks=(task,),
        vocab_size=8,
        dissemination=DisseminationTable(mode=policy.mode),
        activation=ActivationTable(
            gamma=policy.gamma, by_cost=ablation.by_cost, learner_usd_per_h=learner.usd_per_h
        ),
        lease_silence_s=FOREVER_S,
        heartbeat_s=FOREVER_S,
    )


class FleetWorld:
    """Simulates one fleet."""

    def __init__(self, fleet: FleetSpec, ablation: Ablation | None = None) -> None:
        count = sum(kind.count for kind in fleet.workers)
        if count > PEERS_MAX:
            raise OperatorFault(
                f"fleet.count: expected at most {PEERS_MAX} workers to simulate; found {count}"
            )
        self._fleet, self._ablation = fleet, ablation or Ablation()
        learner, self._simulate = fleet.learner, fleet.simulate
        self._chance = random.Random(self._simulate.rng_seed)
        self._clock = Clock()
        self._turns = self._simulate.turns
        self.tools = FleetTools(self._simulate, self._chance, PLANNED_TOKENS_MAX)
        policy, self._rules = fleet.policy, _rules(fleet, self._ablation, self.tools)
        nothing = Recovered.nothing()
        self.measurements = Measurements(self._simulate.group_size)
        self.statistics = Statistics(measurements=self.measurements)
        self.members = Membership(self._rules.run_id, FOREVER_S)
        self.versions = PublishedVersions((), PublishSeq(0))
        self.staleness = Staleness(self._rules, nothing)
        parts = RunParts(self._rules, self.members, self.versions, self.statistics)
        self.boxes: dict[PeerId, FleetWorker] = {}
        self._deliveries = KnownDeliveries(self.boxes, self._rules.window)
        self._scheduler = LeaseScheduler(
            parts,
            tag=1,
            deliveries=self._deliveries,
        )
        self.groups = Groups(
            parts, nothing, staleness=self.staleness,
            scheduler=self._scheduler,
        )  # fmt: skip
        self.capacity_planner = CapacityPlanner(
            self._rules,
            self.measurements,
            Assumptions(
                learner.t_train_s, 0.0, policy.pause_s, policy.t_gen_s, policy.recompute_s, fleet.lengths,
            ),
            order_seed=self._ablation.rng_seed,
        )  # fmt: skip
        self.spreading = FleetVersions(
            fleet, self._ablation, self._clock, self.boxes, parts=parts,
            capacity_planner=self.capacity_planner, served=self._served,
        )  # fmt: skip
        self._sessions = 0
        self.learner = FleetLearner(
            learner, self._simulate.train_sigma, self._chance, self._clock, staleness=self.staleness,
            statistics=self.statistics, committed=self._committed,
        )  # fmt: skip
        # The time from which the bubble is measured, and the seconds that the learner had waited by then.
        self._measured_from = 0.0, 0.0
        self._look_s = math.inf
        fastest = self._turns * max(
            kind.trajectories_per_h / fleet.slots(kind) for kind in fleet.workers
        )
        self._advance_s = (
            min(ADVANCE_S_MAX, ADVANCE_SHARE * 3600.0 / fastest) if fastest else ADVANCE_S_MAX
        )
        self._advancing = False
        self._advances = 0
        self._wakes_at = 0.0
        self._told_at = 0.0
        self._begun: dict[GroupId, float] = {}  # when each open group began, with its first lease
        # Seconds from the beginning of each group until it was complete.
        self.group_s: list[float] = []
        # Seconds from the beginning of each dropped group until it was dropped.
        self.dropped_s: list[float] = []
        self._moved = 0
        # The length of each sample, over the mean.
        self._works: dict[tuple[GroupId, int], float] = {}
        self._settle_at = 0.0
        self.demands: list[tuple[float | None, float]] = []  # mu_min and mu_pool at each publish

    def run(self, progress: Callable[[float], None] = lambda _: None) -> dict[str, Any]:
        """Simulate all hours and return `facts`. progress: is called now and then with the share that is done.

        Fault: nothing was trained for the time of STANDS_STEPS planned steps.
        """
        step_s = provision(self._fleet, self._ablation).step_s
        self._look_s = (STANDS_STEPS * step_s + self._fleet.learner.restart_s) / LOOKS
        if self._look_s < math.inf:
            self._clock.after(self._look_s, self._look, 0, 0)
        for kind in self._fleet.workers:
            for number in range(1, kind.count + 1):
                self._join(kind, f"{kind.name}#{number}")
        self.spreading.publish(0)
        limit = self._simulate.hours * 3600.0
        while self._clock.step(limit):
            if self._advances % _CHECK_EVERY == 0:
                progress(self._clock.now / limit)
        self._clock.now = limit
        self._advance()
        self._check()
        return self.facts()

    def _look(self, step: int, idle: int) -> None:
        """Raise a Fault if LOOKS looks in a row find that workers are active but no step was committed.

        step: the step that was committed at the look before. idle: how many looks in a row found no progress.
        """
        works = any(box.here and box.peer.service.active for box in self.boxes.values())
        idle = idle + 1 if works and self.staleness.committed == step else 0
        if idle == LOOKS:
            raise Fault(
                f"nothing was trained for {LOOKS * self._look_s:,.0f} s after step {step}, although workers generate: "
                f"a step was planned to take {LOOKS * self._look_s / STANDS_STEPS:,.0f} s"
            )
        self._clock.after(self._look_s, self._look, self.staleness.committed, idle)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Let a test schedule a call."""
        self._clock.after(seconds, act)

    def lose(self, box: FleetWorker) -> None:
        """Let the worker fall silent for ever. With `simulate.migrate` other workers continue its samples from the
        progress that it reported last.
        """
        if self._simulate.migrate and box.peer.engine.serving is not None:
            now = self.statistics.now = self._clock.now
            for lease in self._scheduler.leases.of_worker(box.peer.peer):
                told = box.progress(lease, now)
                self._perform(self._scheduler.progressed(box.peer, told, now=now))
        box.here, self._deliveries.review_at = False, 0.0
        self._clock.after(SILENCE_S, self._given_up, box)

    @property
    def publish_every(self) -> int:
        return self.capacity_planner.publish_every()

    # --- workers

    def _join(self, kind: WorkersTable, name: str, price: Price | None = None) -> None:
        now = self._clock.now
        slots = self._fleet.slots(kind)
        self._sessions += 1
        session, peer_id = SessionId(self._sessions), PeerId(name)
        hello = Hello(
            OURS,
            None,
            "worker",
            name,
            f"{self._sessions}",
            slots,
            None,
            None,
            (),
            (),
            (),
        )
        joined, _ = self.members.connected(PeerConnected(session, peer_id, hello), now=now)
        assert joined is not None
        peer = joined.peer
        peer.service.active, peer.engine.serving = False, None
        before = self.boxes.get(peer_id)
        speed = (
            self._chance.lognormvariate(-(kind.speed_sigma**2) / 2, kind.speed_sigma)
            if before is None
            else before.speed
        )
        price = price or Price(
            self._fleet.usd_per_h(kind), kind.usd_per_gb_down, kind.usd_per_gb_up
        )
        box = FleetWorker(name, kind, peer, speed, price)
        if before is not None:
            box.usd = before.usd
        self.boxes[peer_id], self._deliveries.review_at = box, 0.0
        if kind.stay_h:
            stay_s = self._chance.expovariate(1.0 / (kind.stay_h * 3600.0))
            self._clock.after(max(0.0, stay_s - kind.notice_s), self._leaves, box)
        if kind.price_sigma:
            self._clock.after(3600.0, self._new_price, box)
        self.spreading.joined(box)

    def _served(self) -> None:
        """A worker began to serve a version."""
        self._decide()
        self._advance_soon()

    def _leaves(self, box: FleetWorker) -> None:
        """The worker is taken away: after a notice it drains first; without one it falls silent at once."""
        box.leaving = box.kind.notice_s > 0
        if box.leaving:
            self._decide(lost=box.peer.service.active)
        self._clock.after(box.kind.notice_s, self._left, box)

    def _left(self, box: FleetWorker) -> None:
        self.lose(box)
        away_h = box.kind.stay_h * (1.0 - box.kind.availability) / box.kind.availability
        back_s = (
            SILENCE_S + 1.0 + (self._chance.expovariate(1.0 / (away_h * 3600.0)) if away_h else 0.0)
        )
        self._clock.after(back_s, self._join, box.kind, box.name, box.price)

    def _given_up(self, box: FleetWorker) -> None:
        box.pay(self._clock.now)
        box.active_since = None
        self.members.left(box.peer)
        self._perform(self._scheduler.worker_left(box.peer, now=self._clock.now))
        self._decide(lost=box.peer.service.active)
        self._advance_soon()

    def _new_price(self, box: FleetWorker) -> None:
        if box.here:
            box.pay(self._clock.now)
            changed = self._chance.lognormvariate(0.0, box.kind.price_sigma)
            box.price = replace(box.price, usd_per_h=box.price.usd_per_h * changed)
            self._clock.after(3600.0, self._new_price, box)

    # --- who is active

    def _candidates(self) -> list[Candidate]:
        copies, guessed = self.spreading.copies, self.measurements.guessed
        return [
            Candidate(
                name,
                self._mu(box),
                box.price,
                copies.get(box.kind.name, 0.0),
                leaving=box.leaving,
                guessed=guessed(name),
                slots=box.peer.slots,
            )
            for name, box in self.boxes.items()
            # A silent worker stays a candidate until it is given up, because the coordinator does not know yet.
            if box.peer.engine.serving is not None
        ]

    def _mu(self, box: FleetWorker) -> float:
        return self.measurements.mu(box.peer.peer, box.peer.slots, box.expected)

    def demand(self) -> Demand:
        """The present demand, from measurements; until there are any, from the file and the planner's predictions."""
        demand = self.capacity_planner.demand(self.publish_every)
        assert demand is not None
        return demand

    def _decide(self, *, lost: bool = False) -> None:
        """Choose the active workers again. lost: an active worker was lost, so do not wait for the next review.

        Measured rates are updated once per publish period, as in a run.
        """
        now = self._clock.now
        if not lost and now < self.capacity_planner.activation.waits_until():
            return
        if now >= self._settle_at:
            period_s = self.demand().period_s
            said = {key: box.expected for key, box in self.boxes.items()}
            self.measurements.settle(period_s, said, now=now)
            self._settle_at = now + period_s
        self.statistics.now = now
        decision = self.capacity_planner.review(
            self._candidates(),
            self.publish_every,
            self.statistics.learner.waited_for_rollouts_s(now=self.statistics.now),
            now=now,
        )
        for names, active in ((decision.activate, True), (decision.deactivate, False)):
            for name in names:
                self._set_active(self.boxes[PeerId(name)], active=active)
        if decision.activate:
            self._advance_soon()

    def _set_active(self, box: FleetWorker, *, active: bool) -> None:
        box.pay(self._clock.now)
        box.active_since = self._clock.now if active else None
        box.peer.service.active = active
        self.members.changed.add(box.peer.peer)

    # --- rollouts

    def _advance_soon(self) -> None:
        if not self._advancing:
            self._advancing = True
            self._clock.after(self._advance_s, self._advance)

    def _advance(self) -> None:
        self._advancing = False
        self.statistics.now = self._clock.now
        if self._turns > 1:
            leased = self._scheduler.leases.samples
            self.tools.count(self._scheduler.slots, leased, self._clock.now)
        self._advances += 1
        self._freeze()
        self._grant()
        # A group that went on without its late samples may have completed the batch.
        if self._freeze():
            self._grant()
        self.learner.train()
        self._wake_later()
        if self._advances % _CHECK_EVERY == 0:
            self._check()

    def _wake_later(self) -> None:
        """Advance when a worker's rest ends or a group has waited long enough, even if nothing happens until then."""
        wake_at = self._scheduler.wake_at()
        if wake_at is None:
            return
        # Such deadlines are checked at most once in ten advances.
        wake_at = max(wake_at, self._clock.now + 10 * self._advance_s)
        if self._wakes_at <= self._clock.now or wake_at < self._wakes_at:
            self._wakes_at = wake_at
            self._clock.at(wake_at, self._advance_soon)

    def _freeze(self) -> bool:
        """Freeze all batches that can be filled. Returns whether there was one."""
        asked, filled = self.staleness.committed + PREFETCH_STEPS, False
        self._perform(self.groups.before_batch(asked))
        while self.staleness.freeze(asked) is not None:
            filled = True
            self._perform(self.groups.before_batch(asked))
        return filled

    def _grant(self) -> None:
        for _ in range(2):  # The second time grants the prompts that were drawn in the first.
            self._perform(self.groups.age(now=self._clock.now))
            self._move_stragglers()
            self._perform(self._scheduler.fill(now=self._clock.now))
            if not self._perform(self.groups.draw_ahead(self._scheduler.slots)):
                return

    def _move_stragglers(self) -> None:
        """Move late samples to faster workers. In a run workers report their progress every two seconds; here it is
        read just before it is needed.
        """
        now = self._clock.now
        if now >= self._told_at + JUDGED_SHARE * self._fleet.policy.t_gen_s:
            self._told_at = now
            for _, lease, _ in self.groups.stragglers.waited_for():
                lease.longest.update(self.boxes[lease.worker].written(lease, now))
        if moves := self.groups.late_moves(now=now):
            for lease, _ in moves:
                box = self.boxes[lease.worker]
                self._scheduler.progressed(box.peer, box.progress(lease, now), now=now)
            self._perform(self.groups.move(moves, now=now))

    def _perform(self, actions: Iterable[CoordinatorAction]) -> bool:
        """Perform actions of the core. Returns whether prompts were drawn."""
        drawn = False
        for action in actions:
            # Chains of isinstance are fast, and a simulation spends most of its time here.
            if isinstance(action, Persist):
                if isinstance(action.record, NOTED):
                    self._notes(action.record)
            elif isinstance(action, Send):
                self._hears(action.session, action.message)
            elif isinstance(action, ScoreSample):
                scored = SampleScored(action.group, action.sample, self._reward(action.group), "")
                self._perform(self.groups.scored(scored))
            elif isinstance(action, StepEnvironment):
                seconds, answer = self.tools.step(action, self._reward(action.group))
                self._clock.after(seconds, self._tool_answers, answer)
            elif isinstance(action, DrawPrompt):
                self.groups.prompt_drawn(PromptDrawn(action.cursor, pack_tokens([2])))
                drawn = True
            elif (
                isinstance(action, Note) and action.kind == "buffered" and action.group is not None
            ):
                self.group_s.append(self._clock.now - self._begun.pop(action.group))
            elif isinstance(action, StopRun):
                raise AssertionError(action.reason)
        return drawn

    def _tool_answers(self, answer: ToolAnswer) -> None:
        now = self.statistics.now = self._clock.now
        self.tools.answered(answer)
        if isinstance(answer, EpisodeEnded):
            self._perform(self.groups.episode_ended(answer, now=now))
        else:
            self._perform(self.groups.environment_stepped(answer, now=now))
        self._advance_soon()

    def _serving(self, worker: PeerId) -> VersionKey | None:
        box = self.boxes.get(worker)
        return None if box is None else box.peer.engine.serving

    def _notes(self, record: object) -> None:
        """Record when groups begin and are dropped, and count samples that move to another worker."""
        if isinstance(record, PromptTaken):
            self._begun[record.group] = self._clock.now
        elif isinstance(record, GroupDropped):
            if (begun := self._begun.pop(record.group, None)) is not None:
                self.dropped_s.append(self._clock.now - begun)
        elif isinstance(record, LeaseGiven):
            self._moved += record.base.length > record.base.turn_start

    def _reward(self, group: GroupId) -> float:
        """A random reward; 0 for all samples of a group that is to be dropped because its rewards are the same."""
        share = self._fleet.policy.no_variance
        drawn_by = f"{self._simulate.rng_seed} {group}"
        is_flat = share > 0 and random.Random(drawn_by).random() < share
        return 0.0 if is_flat else self._chance.random()

    def _hears(self, session: SessionId, message: ToPeer) -> None:
        """The worker of this session receives a message about its leases."""
        if isinstance(message, LeaseGranted):
            box = self._box(session)
            assert box is not None
            works = [self._work(message, sample) / self._turns for sample in message.samples]
            again = message.written > 0
            if self._turns > 1:
                cached = self.tools.begins(message, box.peer.peer, self._serving)
                again = again or (message.earlier > 0 and not cached)
            extra_s = self._fleet.policy.recompute_s if again else 0.0
            for sample in box.begin(message, works, extra_s, self._clock.now):
                self._clock.at(sample.due, self._finished, box, sample)
        elif isinstance(message, LeaseCancelled) and (box := self._box(session)) is not None:
            box.cancel(HeldLease(message.lease, message.attempt))

    def _work(self, granted: LeaseGranted, sample: int) -> float:
        """The length of this sample, over the mean. A sample that another worker continues keeps its length."""
        key = granted.group, sample
        if granted.written and key in self._works:
            return self._works[key]
        simulate = self._simulate
        sigma = simulate.gen_sigma
        of_prompt = sigma * math.sqrt(simulate.prompt_share)
        of_sample = sigma * math.sqrt(1.0 - simulate.prompt_share)
        work = self._chance.lognormvariate(-(sigma**2) / 2, of_sample)
        if of_prompt:
            drawn_by = f"{simulate.rng_seed} length of {granted.group}"
            work *= math.exp(random.Random(drawn_by).gauss(0.0, of_prompt))
        self._works[key] = work
        if len(self._works) > WORKS_MAX:
            keep_newest(self._works, WORKS_MAX)
        return work

    def _box(self, session: SessionId) -> FleetWorker | None:
        peer = self.members.of_session(session)
        return None if peer is None else self.boxes[peer.peer]

    def _finished(self, box: FleetWorker, sample: FleetSample) -> None:
        if not box.here or (sample.lease, sample.sample) not in box.samples:
            return
        if box.moved(sample):
            self._clock.at(max(sample.due, self._clock.now), self._finished, box, sample)
            return
        self.statistics.now = self._clock.now
        self._perform(self._scheduler.finished(box.peer, box.finish(sample), now=self._clock.now))
        self._advance_soon()

    def _committed(self, step: int) -> None:
        """The learner has committed a step."""
        # The bubble is measured from step 2 * (S + 1) on.
        if step == 2 * (self._rules.staleness_max + 1):
            self._measured_from = self._clock.now, self.learner.waited_s
            self.tools.begin_counting(self._clock.now)
        if step - self.spreading.published >= self.publish_every:
            self.spreading.publish(step)
            self.demands.append((mu_min(self.demand()), self.mu_pool))
        self._decide()
        self._advance_soon()

    # --- results

    @property
    def mu_pool(self) -> float:
        """The measured trajectories/s of all workers that are active and present."""
        return sum(
            self._mu(box) for box in self.boxes.values() if box.here and box.peer.service.active
        )

    def facts(self) -> dict[str, Any]:
        """The results: the keys of `plan`, with measured values, and keys that only a simulated run has."""
        now, demand, steps = self._clock.now, self.demand(), self.staleness.committed
        from_s, waited_s = self._measured_from
        idle_s, measured_s = self.learner.waited_s - waited_s, now - from_s
        bubble, histogram = (
            idle_s / measured_s if measured_s > 0 else 1.0,
            self.statistics.staleness,
        )
        verdict = judge(demand, sum(self._mu(box) for box in self.boxes.values() if box.here))
        feasible = bubble <= BUSY or verdict.feasible
        return {
            "feasible": feasible,
            "why_not": "" if feasible else verdict.why_not,
            "mu_min": verdict.mu_min,
            "mu_pool": self.mu_pool,
            "bubble": bubble,
            "t_bcast_s": demand.t_bcast_s,
            "relays": self.spreading.relays,
            "usd_per_step": self._usd() / steps if steps else None,
            "workers": self._kinds(),
            "steps": steps,
            "learner_losses": self.learner.losses,
            "max_staleness": max(histogram, default=0),
            "staleness_histogram": {str(each): count for each, count in sorted(histogram.items())},
            "trajectories": {
                "trained": self.statistics.trajectories_trained,
                "dropped": self.statistics.trajectories_dropped,
            },
            "group_s": {
                name: quantile(self.group_s, share) for name, share in GROUP_QUANTILES.items()
            },
            "group_or_drop_s": {
                name: quantile([*self.group_s, *self.dropped_s], share)
                for name, share in GROUP_QUANTILES.items()
            },
            "samples_moved": self._moved,
            **(self.tools.facts(measured_s) if self._turns > 1 else {}),
            "egress_gb": self.spreading.egress_gb,
            "seed_copies": self.spreading.copies_each,
            "seed_usd": self.spreading.seed_usd,
            "relayed_gb": self.spreading.relayed_gb,
            "activation_changes": self.capacity_planner.activation.changes,
            "usd": self._usd(),
        }

    def _usd(self) -> float:
        """All costs until now, in usd."""
        for box in self.boxes.values():
            box.pay(self._clock.now)
        paid_s = max(0.0, self._clock.now - self.learner.away_s)
        learner_usd = self._fleet.learner.usd_per_h * paid_s / 3600.0
        return (
            learner_usd
            + sum(box.usd for box in self.boxes.values())
            + self.spreading.bandwidth_usd
            + self.spreading.seed_usd
        )

    def _kinds(self) -> list[dict[str, Any]]:
        """For each kind, the workers that are active at the end, and rho: their present price over what they make."""
        rows = []
        for kind in self._fleet.workers:
            active = [
                box
                for box in self.boxes.values()
                if box.kind is kind and box.here and box.peer.service.active
            ]
            mu = sum(map(self._mu, active))
            usd = sum(box.price.usd_per_h for box in active)
            rows.append(
                {
                    "name": kind.name,
                    "count": len(active),
                    "rho": usd / (3600.0 * mu) if mu else None,
                }
            )
        return rows

    def _check(self) -> None:
        # This call forgets the deadlines of leases that have ended, which the check requires. A coordinator calls it
        # after every event.
        self._scheduler.wake_at()
        parts = (
            self.statistics,
            self.measurements,
            self.members,
            self.versions,
            self.staleness,
            self._scheduler,
        )
        for part in (*parts, self.capacity_planner.activation):
            part.check()
        assert max(self.statistics.staleness, default=0) <= self._rules.staleness_max
