"""Makes the parts of the training work of one run, from what the ledger has."""

from collections.abc import Mapping
from dataclasses import dataclass

from echo2d.core.audit.audits import Audits
from echo2d.core.cluster.parts import RunParts
from echo2d.core.work.events import RecoveredRollouts
from echo2d.core.work.scheduler import LeaseScheduler
from echo2d.core.work.training.group_table import GroupTable
from echo2d.core.work.training.open_episodes import OpenEpisodes
from echo2d.core.work.training.partials import Partials
from echo2d.core.work.training.prompts import Prompts
from echo2d.core.work.training.reward_watch import RewardWatch
from echo2d.core.work.training.sampler import Sampler
from echo2d.core.work.training.staleness import Staleness
from echo2d.core.work.training.stragglers import Stragglers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts(RunParts):
    """The state that all parts of the training work read; each field is changed only by its own
    methods.

    prompts: the prompts of each task. audits: None without `[audit]`.
    """

    staleness: Staleness
    scheduler: LeaseScheduler
    audits: Audits | None
    prompts: Mapping[str, Prompts]
    groups: GroupTable
    partials: Partials
    episodes: OpenEpisodes
    stragglers: Stragglers
    watch: RewardWatch


def make_training_parts(
    parts: RunParts,
    recovered: RecoveredRollouts,
    *,
    staleness: Staleness,
    scheduler: LeaseScheduler,
    audits: Audits | None,
) -> TrainingParts:
    leases = scheduler.leases
    prompts = {
        task.name: Prompts(
            recovered.next_cursor(task.name),
            Sampler(
                task.row_filter, (row for row in recovered.rows if row.source.task == task.name)
            ),
            task.name,
            [each.cursor for each in recovered.given_back if each.task == task.name],
        )
        for task in parts.rules.tasks
    }
    groups = GroupTable(parts.rules.drawn, leases)
    partials = Partials(parts, leases=leases, staleness=staleness, audits=audits)
    return TrainingParts(
        rules=parts.rules,
        members=parts.members,
        versions=parts.versions,
        statistics=parts.statistics,
        staleness=staleness,
        scheduler=scheduler,
        audits=audits,
        prompts=prompts,
        groups=groups,
        partials=partials,
        episodes=OpenEpisodes(parts, groups=groups, good=partials.good),
        stragglers=Stragglers(parts, groups=groups, leases=leases),
        watch=RewardWatch(prompts, succeeded=recovered.resume_step > 0),
    )
