"""The parts of the coordinator core, made for one run from what the ledger holds."""

from dataclasses import dataclass

from echo2d.core.audit.audits import Audits
from echo2d.core.broadcast.publishing import Publishing
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.cluster.earned import Earned
from echo2d.core.cluster.holding import Holding
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.reachability import Reachability
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.coordinator.activation_loop import ActivationLoop
from echo2d.core.coordinator.cordons import Cordons
from echo2d.core.coordinator.costs import Costs
from echo2d.core.coordinator.events import Recovered
from echo2d.core.coordinator.learner_api import LearnerCalls
from echo2d.core.rules.run import RunRules
from echo2d.core.tinker.service import TinkerService
from echo2d.core.work.calls.calls import GatewayCalls
from echo2d.core.work.deliveries import Deliveries
from echo2d.core.work.evaluation.evaluations import Evaluations
from echo2d.core.work.scheduler import LeaseScheduler
from echo2d.core.work.training.groups import Groups
from echo2d.core.work.training.staleness import Staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorParts(RunParts):
    """`CoordinatorState` hands events to them; status and glance read them. audits: None without
    `[audit]`. tinker: None without `[tinker]`.
    """

    reachability: Reachability
    holding: Holding
    staleness: Staleness
    scheduler: LeaseScheduler
    audits: Audits | None
    evaluations: Evaluations
    groups: Groups
    gateway: GatewayCalls
    publishing: Publishing
    calls: LearnerCalls
    activation_loop: ActivationLoop
    cordons: Cordons
    costs: Costs
    tinker: TinkerService | None


def make_parts(
    rules: RunRules, recovered: Recovered, *, tag: int, plan_secret: bytes, now: float
) -> CoordinatorParts:
    """tag: names this process in the ids of leases and plans. plan_secret: see `CoordinatorState`."""
    run = _run_parts(rules, recovered, now)
    staleness = Staleness(rules, recovered)
    deliveries = Deliveries(rules.window, rules.drawn_max, recovered.deliveries, now=now)
    scheduler = LeaseScheduler(run, tag=tag, deliveries=deliveries)
    audits = None
    if rules.audit is not None:
        audits = Audits(
            run, recovered.limits, convicted=recovered.convicted, trusted=recovered.trusted
        )
    evaluations = Evaluations(run, recovered.evaluated, scheduler=scheduler)
    groups = Groups(
        run,
        recovered,
        staleness=staleness,
        scheduler=scheduler,
        audits=audits,
        is_held_out=evaluations.is_held_out,
    )
    publishing = Publishing(
        run,
        plan_secret=plan_secret,
        tag=tag,
        rates=recovered.rates,
        form=recovered.form,
        now=now,
    )
    holding = Holding(run.members, run.versions, rules.versions_held, publishing.spreads)
    gateway = GatewayCalls(run, scheduler=scheduler, holding=holding, audits=audits)
    calls = LearnerCalls(
        run,
        recovered,
        staleness=staleness,
        groups=groups,
        publishing=publishing,
        audits=audits,
        evaluations=evaluations,
    )
    tinker = None
    if rules.tinker:
        tinker = TinkerService(
            rules.tinker,
            run.members,
            run.versions,
            recovered.clients,
            holding,
            staleness_max=rules.tinker_staleness_max,
            now=now,
        )
    return CoordinatorParts(
        rules=rules,
        members=run.members,
        versions=run.versions,
        statistics=run.statistics,
        reachability=Reachability(run.members),
        holding=holding,
        staleness=staleness,
        scheduler=scheduler,
        audits=audits,
        evaluations=evaluations,
        groups=groups,
        gateway=gateway,
        publishing=publishing,
        calls=calls,
        activation_loop=ActivationLoop(run, staleness, groups, publishing, calls),
        cordons=Cordons(run.members, scheduler),
        costs=Costs(staleness.committed),
        tinker=tinker,
    )


def _run_parts(rules: RunRules, recovered: Recovered, now: float) -> RunParts:
    return RunParts(
        rules,
        Membership(
            rules.run_id,
            rules.heartbeat_s,
            p2p=rules.dissemination.p2p,
            quantized=rules.quantized_workers,
            versions_held=rules.versions_held,
        ),
        PublishedVersions(
            recovered.published,
            recovered.publish_seq,
            lost=recovered.lost,
            keep_every=rules.keep_every,
        ),
        Statistics(
            now,
            Measurements(rules.group_size),
            trained=recovered.trained,
            dropped=recovered.dropped,
            earned=Earned(recovered.earned),
        ),
    )
