"""What the operator chose for a run: the tables by which the core decides, and `RunRules`, which holds them all."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from echo2d.core.base.ids import RunId
from echo2d.core.base.model_config import ExpertNumbers
from echo2d.core.protocol.answer_end import OutputLimit, output_limit
from echo2d.core.protocol.seeds import SEED_KEY_BYTES
from echo2d.core.rules.audit import AuditRules
from echo2d.core.rules.prices import USD_MAX, NamedPrice
from echo2d.core.rules.table import Table, key
from echo2d.core.rules.tasks import EvalRules, GatewayRules, TaskRules
from echo2d.registry import SHAPES

# The largest S: on older data training is off-policy in all but name, and the buffers grow with S.
STALENESS_MAX = 64
# A batch body of 1 GiB holds this many trajectories of 8k tokens.
TRAJECTORIES_PER_STEP_MAX = 16384
# At most this share of a group's answers, or one answer, may be missing when its patience ends.
MISSING_SHARE = 1 / 8
# Provisioned throughput over needed throughput. The margin covers noise in T_train and mu; it is the paper's default.
GAMMA = 1.1

DisseminationMode = Literal["background", "exclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTable(Table):
    TABLE: ClassVar[str] = "policy"

    staleness_max: int = key(
        "S: the oldest data allowed in a gradient, in train steps", 3, low=0, high=STALENESS_MAX
    )
    publish_every: int | Literal["auto"] = key(
        'kappa: train steps per publish, 1 to S + 1, or "auto"', "auto", low=1
    )
    trajectories_per_step: int = key(
        "R: trajectories per train step", 64, low=1, high=TRAJECTORIES_PER_STEP_MAX
    )
    group_size: int = key(
        "trajectories per prompt; divides trajectories_per_step", 8, low=1, high=1024
    )
    group_min: int = key(
        "trajectories that a group must have if the rewards of others fail; 0: half of group_size",
        0,
        low=0,
        high=1024,
    )
    over_stale: Literal["drop", "mask"] = key(
        "groups with tokens older than S: drop them, or keep them and mask these tokens", "drop"
    )
    filter_zero_variance: bool = key("replace groups whose rewards are all equal", True)
    move_stragglers: bool = key(
        "move the answers that a group waits for to faster workers, with their tokens", True
    )
    group_patience: float = key(
        "a group that lacks at most an eighth of its answers, or one answer, is trained without them once it has"
        " waited this many times as long as the others took, or when the last batch that can take it is filled;"
        " 0: it waits until it is too old",
        3.0,
        low=0.0,
        high=1000.0,
    )
    columns: tuple[str, ...] = key(
        "numbers per token that the learner gets if engines write them, such as"
        ' ["experts"], which the learner replays (docs/design/learner.md); others are dropped on arrival',
        (),
    )
    quantized_workers: bool = key(
        "let workers in whose engines compute with quantized weights; trust one of each kind if"
        " [audit] is on (docs/guide/audit.md)",
        False,
    )
    order: Literal["oldest", "priority"] = key(
        "which complete groups a step takes first; priority: those whose rewards differ most, after"
        " those that cannot wait for another step",
        "oldest",
    )

    @property
    def samples_min(self) -> int:
        """How many samples of a group are enough if the rewards of the others fail."""
        return self.group_min or (self.group_size + 1) // 2

    @property
    def groups_per_step(self) -> int:
        return self.trajectories_per_step // self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DisseminationTable(Table):
    TABLE: ClassVar[str] = "dissemination"

    shape: str = key(
        "how versions spread; auto: relay trees chosen by measured uplinks", "auto", choices=SHAPES
    )
    chains: int = key("number of chains (stripes) of the chain shape", 1, low=1, high=16)
    mode: DisseminationMode = key(
        "background: workers generate while they receive a version; exclusive: they stop for it"
        " (as in ECHO-2)",
        "background",
    )
    p2p: bool = key(
        "workers pass versions on; false: this host sends each version to each worker (to compare)",
        True,
    )
    delta: bool = key(
        "send only the difference from a version that most workers have; false: always in full",
        True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTable(Table):
    TABLE: ClassVar[str] = "activation"

    mode: Literal["all", "auto"] = key(
        "all: every worker gets leases; auto: only those with which a train step costs least",
        "all",
    )
    by_cost: bool = key(
        "with auto, take the cheapest workers first; false: ignore prices (to compare)", True
    )
    gamma: float = key(
        "boxes are rented when the workers here make less than the target divided by this",
        GAMMA,
        low=1.0,
        high=10.0,
    )
    learner_usd_per_h: float = key(
        "usd per hour of the learner's host: what its waiting costs; 0: not known",
        0.0,
        low=0.0,
        high=USD_MAX,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules(PolicyTable):
    """The [policy] of a run, and everything else that the operator chose and the core needs."""

    run_id: RunId
    tasks: tuple[TaskRules, ...]
    evals: tuple[EvalRules, ...] = ()
    # Every token id is below this.
    vocab_size: int
    # The experts of the model, if the run keeps those of each token and config.json names them.
    experts: ExpertNumbers | None = None
    # Tokens of prompt and answer together that leases may use; None: the model does not say.
    context_max: int | None = None
    dissemination: DisseminationTable = DisseminationTable()
    activation: ActivationTable = ActivationTable()
    # The next two are None if they are off: calls of the gateway, and the audit.
    gateway: GatewayRules | None = None
    audit: AuditRules | None = None
    # The names of the base model for clients of the Tinker API; empty: the run has tasks instead.
    tinker: tuple[str, ...] = ()
    # How many optimizer steps older than their model sampled tokens of these clients may be; None: any.
    tinker_staleness_max: int | None = None
    # Engines hold at most this many versions at once, the served one included (`HeldVersions`).
    versions_held: int = 1
    prices: tuple[NamedPrice, ...] = ()
    # link.usd_per_gb_up. Above 0, the seed sends the fewest copies of a version that still arrive in time.
    seed_usd_per_gb_up: float = 0.0
    # run.disk_bytes_max: the most bytes of snapshot copies.
    disk_bytes_max: int = 1 << 62
    # run.keep_every: which snapshot copies stay.
    keep_every: int = 0
    # A worker is given up after this silence.
    lease_silence_s: float = 15.0
    # A worker sends something at least this often.
    heartbeat_s: float = 2.0
    # The secret key from which the seeds of samples are made; it never leaves the coordinator.
    seed_key: bytes = field(default=bytes(SEED_KEY_BYTES), repr=False)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end tokens of all tasks."""
        return tuple(dict.fromkeys(token for task in self.tasks for token in task.stop_token_ids))

    def drawn(self, task: TaskRules) -> int:
        """How many samples are drawn for a group of this task."""
        return 2 * self.group_size if task.pairs else self.group_size

    @property
    def drawn_max(self) -> int:
        """The most samples that a group of any task has."""
        return max([self.drawn(task) for task in self.tasks], default=self.group_size)

    @property
    def window(self) -> int:
        """How many samples may be under way: those of S + 1 steps (docs/design/staleness.md)."""
        return self.groups_per_step * self.drawn_max * (self.staleness_max + 1)

    def task(self, name: str) -> TaskRules | None:
        """The task of this name; None: the run has none."""
        return next((task for task in self.tasks if task.name == name), None)

    def limit(
        self, task: TaskRules, prompt: bytes, turn_start: int = 0, branch_start: int = 0
    ) -> OutputLimit:
        """The limit on the tokens that may follow this prompt (int32) up to the end of a turn.

        turn_start: the number of tokens of earlier turns, given tokens included. branch_start: how many of these tokens
        are not in the model's context.
        """
        most = turn_start + task.max_new_tokens
        if task.episode is not None:
            most = min(most, task.episode.tokens_max)
        context = self.context_max
        if branch_start and context is not None:
            context += branch_start
        return output_limit(most, prompt_tokens=len(prompt) // 4, context_max=context)
