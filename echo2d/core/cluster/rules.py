"""The numbers that the operator chose for a run, as the core reads them."""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from echo2d.core.base.ids import RunId
from echo2d.core.capacity.model import GAMMA, DisseminationMode
from echo2d.core.capacity.pipeline import MISSING_SHARE
from echo2d.core.capacity.prices import NamedPrice
from echo2d.core.protocol.answer_end import OutputLimit, output_limit
from echo2d.core.protocol.control_messages import SeedReplay
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.protocol.seeds import SEED_KEY_BYTES


@dataclass(frozen=True, slots=True)
class GatewayRules:
    """share: of all slots, at most (one in any case).

    wait_s: a call that waits longer is refused.
    """

    share: float
    wait_s: float


class AnswerClass(NamedTuple):
    """Answers that limits are learnt from together. quantization: as their worker's Hello says.
    mixed: their KV caches may mix versions.
    """

    quantization: str = ""
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class AuditRules:
    """newcomer: trajectories of a new worker that are audited before any is trained on. share: of
    the trajectories of a clear worker that are audited. wait_s: a sample waits so long for its
    verdict, then another worker gets it. replay: by which engine's rule seeds are replayed.
    logprobs: whether a clean prefill gives the logprobs that workers report. trusts: the operator
    trusts some workers. scored_as: how answers are drawn and scored, in words. in_place: workers
    may keep KV caches over a refit, so that those of an answer may mix versions.
    """

    newcomer: int = 20
    share: float = 0.05
    wait_s: float = 60.0
    replay: SeedReplay = "torch"
    logprobs: bool = True
    trusts: bool = True
    scored_as: str = ""
    in_place: bool = False

    def name_of(self, kind: AnswerClass) -> str:
        """What limits are learnt for, in words; another class has other limits."""
        facts = (
            self.replay,
            "" if self.logprobs else "logprobs off",
            self.scored_as,
            kind.quantization,
            "mixed KV" if kind.mixed else "",
        )
        return ", ".join(filter(None, facts))


@dataclass(frozen=True, slots=True)
class RowFilter:
    """When a row is not asked any more: after `retire_after` groups in a row whose rewards were all
    the same. It is asked again `retest_after` versions later.
    """

    retire_after: int = 1
    retest_after: int = 100


@dataclass(frozen=True, slots=True)
class Informative:
    """A row is asked while it may be as informative as the others. explore: what an estimate is unsure
    by, one version after a single group, in units of the reward.
    """

    explore: float = 0.01


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How far an episode of an environment goes.

    turns_max: answers of the policy. tokens_max: written and given, behind the prompt. outside: agents
    outside play it: a sample waits for an agent's first call before it has a lease.
    """

    turns_max: int = 16
    tokens_max: int = 8192
    outside: bool = False


@dataclass(frozen=True, slots=True)
class TaskRules:
    """One task of the run, and how its prompts are answered.

    weight: its share of the groups of a step is this over the sum of all weights. stop_token_ids:
    the task's and the model's end tokens. stop_strings: texts that end an answer. row_filter: None:
    every row is asked. pairs: twice as many samples are drawn as a group has, and those that
    contrast most are kept. episode: its samples are episodes of an environment, and
    max_new_tokens is of each turn; None: of single answers.
    """

    name: str = ""
    weight: Fraction = Fraction(1)
    sampling: Sampling = WHOLE
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    row_filter: RowFilter | Informative | None = None
    pairs: bool = False
    episode: EpisodeRules | None = None


@dataclass(frozen=True, slots=True)
class EvalRules:
    """Held-out questions on which versions are scored.

    task: how they are answered; its name is the evaluation's. every: a version is due if its number
    is at least so much above the last one that was. samples: answers to each question. rows: so
    many questions; 0: all. hold_s: a worker waits so long with a newer version. solved_at: the
    reward from which on an answer is right.
    """

    task: TaskRules
    every: int = 1
    samples: int = 1
    rows: int = 0
    hold_s: float = 60.0
    solved_at: float = 1.0

    @property
    def name(self) -> str:
        return self.task.name


@dataclass(frozen=True, slots=True)
class RunRules:
    """The numbers that the operator chose, by the keys of the configuration.

    R = trajectories_per_step, G = group_size, kappa = publish_every (None: "auto"), S = staleness_max.
    group_min: a group may lack samples whose reward failed, as long as it has so many.
    context_max: tokens of prompt and answer
    together that leases may use; None: the model does not say. over_stale: "drop" or "mask". order: which buffered
    groups a step takes first, "oldest" or "priority". shape: "auto", "star" or
    "chain". mode: with "exclusive" a worker generates nothing while it receives a version. p2p:
    workers pass versions on. activation: leases go to all workers, or to the cheapest ones that are
    enough; by_cost: False: to any that are enough. gamma: throughput that is provided, over what is
    needed. learner_usd_per_h: what its waiting costs; 0: not known. seed_usd_per_gb_up: above 0, the seed sends as
    few copies of a version as there is time for. delta: versions spread as differences from
    one that most workers have. disk_bytes_max: for snapshot copies; beyond it, bases and results are deleted.
    keep_every: of the versions in each span of so many, the first one's copy stays; 0: none.
    move_stragglers: samples that a group waits for go on at faster workers. group_patience: a group waits so many
    times as long for its last samples as for the others (`rollouts.patience`); 0: until it is too old.
    quantized: workers may compute with quantized weights. columns: the names of those that are taken.
    gateway, audit: None: it is off. seed_key: what the seeds of samples are made with, told to nobody.
    """

    run_id: RunId
    staleness_max: int
    publish_every: int | None
    trajectories_per_step: int
    group_size: int
    tasks: tuple[TaskRules, ...]
    vocab_size: int
    over_stale: str
    filter_zero_variance: bool
    shape: str  # a name in `registry.SHAPES`
    chains: int
    mode: DisseminationMode = "background"
    p2p: bool = True
    activation: Literal["all", "auto"] = "all"
    by_cost: bool = True
    gamma: float = GAMMA
    prices: tuple[NamedPrice, ...] = ()
    learner_usd_per_h: float = 0.0
    seed_usd_per_gb_up: float = 0.0
    delta: bool = True
    disk_bytes_max: int = 1 << 62
    keep_every: int = 0
    context_max: int | None = None
    lease_silence_s: float = 15.0
    heartbeat_s: float = 2.0
    gateway: GatewayRules | None = None
    audit: AuditRules | None = None
    evals: tuple[EvalRules, ...] = ()
    order: Literal["oldest", "priority"] = "oldest"
    group_min: int = 1
    move_stragglers: bool = True
    group_patience: float = 0.0
    missing_share: float = MISSING_SHARE
    quantized: bool = False
    columns: tuple[str, ...] = ()
    seed_key: bytes = field(default=bytes(SEED_KEY_BYTES), repr=False)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end tokens of all tasks."""
        return tuple(dict.fromkeys(token for task in self.tasks for token in task.stop_token_ids))

    @property
    def groups_per_step(self) -> int:
        return self.trajectories_per_step // self.group_size

    def drawn(self, task: TaskRules) -> int:
        """How many samples are drawn for a group of this task."""
        return 2 * self.group_size if task.pairs else self.group_size

    @property
    def drawn_max(self) -> int:
        """The most samples that a group of any task has."""
        return max([self.drawn(task) for task in self.tasks], default=self.group_size)

    @property
    def window(self) -> int:
        """The samples that may be under way: those of S + 1 steps (docs/design/staleness.md)."""
        return self.groups_per_step * self.drawn_max * (self.staleness_max + 1)

    def task(self, name: str) -> TaskRules | None:
        """The task of this name; None: the run has none."""
        return next((task for task in self.tasks if task.name == name), None)

    def limit(
        self, task: TaskRules, prompt: bytes, turn_start: int = 0, branch_start: int = 0
    ) -> OutputLimit:
        """The limit of all that may follow this prompt (int32) by the end of a turn.

        turn_start: tokens of earlier turns, given ones included. branch_start: those of them that are not in
        the model's context.
        """
        most = turn_start + task.max_new_tokens
        if task.episode is not None:
            most = min(most, task.episode.tokens_max)
        context = self.context_max
        if branch_start and context is not None:
            context += branch_start
        return output_limit(most, prompt_tokens=len(prompt) // 4, context_max=context)
