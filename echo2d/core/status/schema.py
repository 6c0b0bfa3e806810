"""The status of a run, as types: everything that `GET /v1/status` says, built once by the core.

The coordinator's machine builds a `Status` (`core/coordinator/status.py`), renting builds its
`RentingStatus` (`core/renting/report.py`), and the process around them adds a `ProcessStatus`.
Alerts, metrics, renting, the plan and the terminal views read these types; JSON is derived from
them in `json_form.py`.

Each field declares its meaning, and the name under which it can be scraped. Units: durations in seconds, uplinks in
bytes/s, `mu` in trajectories/s, digests in hex. None means "not known yet" or "there is none".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from echo2d.core.base.described import described
from echo2d.core.capacity.bottleneck import Bottleneck
from echo2d.core.protocol.trajectory import StepFigures
from echo2d.core.rules.run import DisseminationMode

# This many sentences fill one screen: of 500 similar ones, the first few are enough.
SENTENCES_MAX = 24

# Each has a row in docs/guide/operating.md.
AlertKind = Literal[
    "no_learner",
    "learner_silent",
    "run_finished",
    "flat_rewards",
    "learner_refuses",
    "learner_truncates",
    "run_changed",
    "rewards_fail",
    "disk_low",
    "disk_budget",
    "token_expires",
    "seed_away",
    "no_workers",
    "slow_broadcasts",
    "nobody_trusted",
    "no_trusted_worker",
    "quantization_held_back",
    "no_auditor",
    "auditor_behind",
    "renting_short",
    "renting_blind",
    "renting_doubts",
    "renting_stranger",
    "peer_refused",
    "peer_build",
    "worker_convicted",
    "worker_silent",
    "worker_quarantined",
    "worker_misreports",
    "worker_set_aside",
    "seed_cannot_encode",
    "worker_logprobs",
    "worker_suspected",
    "worker_slow",
    "worker_no_version",
    "worker_stale",
    "worker_memory",
    "worker_disk_low",
    "worker_cannot_apply",
]
ALERT_KINDS: tuple[AlertKind, ...] = get_args(AlertKind)
# These describe a state and need no action at once: they should wake no person.
NOTICES: frozenset[AlertKind] = frozenset({"run_finished", "run_changed"})


@dataclass(frozen=True, slots=True)
class Alert:
    """What is wrong."""

    kind: AlertKind = described("one of ALERT_KINDS; a newer coordinator may have others")
    sentence: str = described("what is wrong, in words for a person")
    subject: str = described("the worker's name; empty: it is about the run", default="")
    # Needed because two peers may give themselves the same name.
    peer: str = described("the id of that worker", default="")


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One published version."""

    version: int = described("its number: the train steps in it")
    digest: str = described("the snapshot's digest, in hex")
    publish_seq: int = described("its place in the order of all publishes of the run")


# --- peers


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """A worker or a relay peer."""

    id: str = described("its id, which its key proves")
    name: str = described("the name that it gives itself")
    kind: str = described("worker or relay")
    state: str = described("joined, suspected or gone")
    alive: bool = described("whether it is connected, or was a moment ago")
    silent_s: float = described("Seconds since its last message", "echo2d_worker_silent_seconds")
    uplink: float | None = described("measured bytes/s; null: not yet")
    quarantined: bool = described("whether it passed on bad frames, so that it now only receives")
    misreports: int = described(
        "how many of its reports no honest program sends; above 0, it is quarantined and does no work",
        default=0,
    )
    token: str = described("the token with which it enrolled", default="")
    cordoned: bool = described("whether an operator has taken it out of service", default=False)
    draining: bool = described("whether it must end once it holds nothing", default=False)
    reachable: bool | None = described("whether other peers can dial it; null: not tested yet")
    build: str = described("the build of its program")
    protocol: int = described("the protocol of its control link")
    received_bytes: int = described(
        "version bytes that it reports to have received since the coordinator started", default=0
    )
    sent_bytes: int = described("version bytes that it reports to have passed on", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(PeerStatus):
    """A worker: what it runs, what it serves, what it makes and what it costs."""

    slots: int = described("Samples that its engines can run at once", "echo2d_worker_slots")
    usable: int = described(
        "How many of its slots it may use, by what it delivers", "echo2d_worker_slots_usable"
    )
    tokens_per_s: float | None = described(
        "Tokens/s delivered lately while it held samples", "echo2d_worker_tokens_per_second"
    )
    slower: float | None = described(
        "how many times as long as usual a sample takes there; null: it delivered nothing, or"
        " nothing is known"
    )
    running: int = described(
        "Samples in its engines, by its last heartbeat", "echo2d_worker_running_samples"
    )
    leases: int = described("how many leases it holds")
    leases_end_s: float | None = described(
        "seconds until the first of its leases goes to another worker if it stays silent"
    )
    leased: int = described("Samples that it holds", "echo2d_worker_leased_samples")
    serving: VersionStatus | None = described("the version in its engines; null: none")
    lag: int | None = described(
        "Newest published version minus the one served", "echo2d_worker_lag_versions"
    )
    accepted: int = described("Its accepted results", "echo2d_worker_accepted", counter=True)
    refit_pause_s: float | None = described(
        "seconds for which its engines generated nothing during the last refit"
    )
    recomputed_tokens: int | None = described("tokens whose KV caches its last refit dropped")
    recompute_s: float | None = described("seconds for which it recomputed those KV caches")
    memory_ok: bool | None = described(
        "whether the weights in its engines equal the snapshot's; null: not checked"
    )
    active: bool = described(
        "1 while it gets leases; 0 while it stands by, leaves, or is away", "echo2d_worker_active"
    )
    leaving: bool = described("whether it announced that it leaves")
    mu: float | None = described(
        "Its throughput while its slots are leased; an expectation until it is measured",
        "echo2d_worker_trajectories_per_second",
    )
    mu_sd: float | None = described("standard error of mu; null: mu is an expectation")
    usd_per_h: float = described("its price")
    usd_per_gb_down: float = described("usd per 10^9 bytes that it receives")
    usd_per_gb_up: float = described("usd per 10^9 bytes that it sends")
    rho: float | None = described("usd for each of its trajectories")
    cost_usd: float = described("what it cost in usd since the coordinator started", default=0.0)
    reward: float | None = described("Mean reward of its trajectories", "echo2d_worker_reward_mean")
    reward_above: float | None = described(
        "Its mean reward minus that of other workers on the same prompts",
        "echo2d_worker_reward_above_others",
    )
    answer_tokens: float | None = described("Mean answer tokens", "echo2d_worker_answer_tokens")
    used: float = described(
        "Of its trajectories that were judged worth training on or not, the share that was trained on",
        "echo2d_worker_trained_share",
    )
    trained: int = described(
        "Its answers that were trained on", "echo2d_worker_trained", counter=True
    )
    audited: int = described(
        "Its answers that an audit scored", "echo2d_worker_audited", counter=True
    )
    flagged: int = described(
        "Its audited answers that are not the model's", "echo2d_worker_flagged", counter=True
    )
    standing: str = described("how the audit classes it; empty: not at all")
    verdict: str = described("why it is convicted; empty: it is not")
    learner_k: float | None = described(
        "Mean difference in nats per token between its logprobs and the learner's, for its trained answers",
        "echo2d_worker_learner_k",
    )
    learner_z: float | None = described(
        "Mean Z of its trained answers by the learner; about 0 if their tokens were drawn from the model",
        "echo2d_worker_learner_z",
    )
    disk_free_bytes: int | None = described(
        "Bytes that new versions may take on its disk; no sample: it did not report any",
        "echo2d_worker_disk_free_bytes",
        default=None,
    )
    set_aside: str = described(
        "why it gets no leases though no operator ordered that: the rewards of its answers fail",
        default="",
    )


# --- how versions spread


@dataclass(frozen=True, slots=True, kw_only=True)
class FormStatus:
    """One form of a version."""

    version: int = described("the version that it encodes")
    form: str = described("its id, in hex")
    base_version: int | None = described("the version that it is a delta from; null: it is full")
    whole: bool = described("whether it is completely encoded")
    wire_bytes: int | None = described("bytes of the form; null: it is not complete")
    full_bytes: int = described("bytes of the snapshot")
    shape: str | None = described("the shape of its plan")
    predicted_s: float | None = described("how many seconds its plan predicts")


@dataclass(frozen=True, slots=True)
class ProgressStatus:
    """How far one peer has come with a form."""

    id: str = described("the peer's id")
    name: str = described("the name that it gives itself")
    payload_bytes: int = described("how many bytes it has")
    duplicates: int = described("how many frames it received twice")
    verified: bool = described("whether it has all bytes and they are right")
    failed: bool = described("whether it failed to apply them")


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStatus(FormStatus):
    """The form that spreads now."""

    waiting_version: int | None = described("the newer version that spreads after it")
    peers: tuple[ProgressStatus, ...] = described("the peers that get it")


@dataclass(frozen=True, slots=True)
class VersionBytes:
    """The size of a version."""

    wire_bytes: int = described("bytes of its form")
    full_bytes: int = described("bytes of the snapshot that it was made from")


# --- what is needed and what is there


@dataclass(frozen=True, slots=True)
class EstimateStatus:
    """A measured number."""

    value: float = described("the estimate")
    sd: float | None = described("its standard error; null: too few samples")
    samples: int = described("how many samples it is computed from")


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatesStatus:
    """What the run has measured about itself."""

    t_train_s: EstimateStatus | None = described("seconds of a train step, net of waiting")
    t_bcast_s: EstimateStatus | None = described("seconds from publish until all workers serve it")
    t_gen_s: EstimateStatus | None = described("seconds of a trajectory, from lease to result")
    refit_pause_s: EstimateStatus | None = described("seconds for which a refit stops generation")
    recompute_s: EstimateStatus | None = described("seconds in which KV caches are recomputed")
    still_s: EstimateStatus | None = described("seconds for which workers stop for a version")
    wire_bytes: EstimateStatus | None = described("bytes of an encoded version")
    discarded: EstimateStatus | None = described("the share of trajectories that are discarded")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionStatus:
    """The throughput that the learner needs, and the throughput that the workers have."""

    activation: str = described("activation.mode")
    learner_usd_per_h: float = described("activation.learner_usd_per_h")
    mu_pool: float = described(
        "Trajectories per second of the active workers, as measured", "echo2d_mu_pool"
    )
    # If no throughput is enough, this is null and `echo2d_mu_min` is infinite.
    mu_min: float | None = described("trajectories/s with which the learner never waits")
    mu_target: float | None = described("trajectories/s of the cheapest pool")
    mu_available: float = described("trajectories/s of all workers that are here")
    bubble_predicted: float | None = described("share of time for which the learner will wait")
    feasible: bool | None = described("whether all workers together keep the learner busy")
    why_not: str = described("why the learner must wait and what would help; empty: it need not")
    changes: int = described(
        "Changes of the set of active workers that no event forced",
        "echo2d_activation_changes",
        counter=True,
    )
    why: str = described("what the cheapest pool and its neighbours cost per step")
    gamma: float = described("activation.gamma")
    gen_sigma: float | None = described(
        "the spread of the logarithms of samples' lengths; null: not measured yet"
    )
    mode: DisseminationMode = described("dissemination.mode")
    estimates: EstimatesStatus = described("what the run has measured about itself")
    shortfall: float | None = described(
        "trajectories/s by which all workers here miss the target; negative: by which they exceed it"
    )
    bubble: float | None = described("share of the last steps for which the learner waited")
    bottleneck: Bottleneck = described("what the run waits for now")


# --- learner and run


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """The learner of the current session."""

    name: str = described("its identity", default="")
    software: str = described("its version of echo2d; empty: it sends no signs of life", default="")
    heard: bool = described("whether it sent anything since the coordinator started", default=False)
    silent_s: float = described(
        "seconds since its last message, or since the coordinator started; 0 while it waits for a batch",
        default=0.0,
    )
    steps: int | None = described(
        "the step after which it ends; null: it did not say", default=None
    )
    eta_s: float | None = described(
        "seconds until it ends, at the pace of the newest steps", default=None
    )
    figures: StepFigures = described("what it measured in the last step", default=StepFigures())


@dataclass(frozen=True, slots=True)
class TotalsStatus:
    """Counts of the whole run. After a restart `dropped` continues from the last commit before it."""

    trained: int = described("how many trajectories were trained on", default=0)
    dropped: int = described("how many trajectories were dropped", default=0)
    published: int = described("how many versions were published", default=0)


@dataclass(frozen=True, slots=True)
class NamedTask:
    """A task by its name."""

    name: str = described("its name")
    kind: str = described("the name of one of our tasks, or where the operator's class is")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run consists of."""

    name: str = described("run.name", default="")
    model: str = described("the base model's directory; empty: none is named", default="")
    tasks: tuple[NamedTask, ...] = described("its tasks", default=())
    software: str = described("the coordinator's version of echo2d", default="")
    started_at: float = described("when the coordinator started, in Unix time", default=0.0)
    changes: tuple[str, ...] = described(
        "sentences about what has changed since the previous start", default=()
    )


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """The disk with the run's directory."""

    free_bytes: int = described("free bytes on this disk")
    bytes_max: int = described("run.disk_bytes_max")


@dataclass(frozen=True, slots=True)
class TokenExpiry:
    """A token that expires within a week, or expired within the last one."""

    name: str = described("its name")
    role: str = described("its role")
    left_s: float = described("seconds until it expires; negative: seconds since it expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsStatus:
    """What the workers cost by their prices."""

    workers_usd_per_h: float = described(
        "Price per hour of all workers that are here, without traffic",
        "echo2d_workers_usd_per_hour",
        default=0.0,
    )
    workers_usd: float = described(
        "What workers cost since the coordinator started",
        "echo2d_workers_usd",
        counter=True,
        default=0.0,
    )
    steps: int = described("steps committed since the coordinator started", default=0)
    usd_per_step: float | None = described(
        "What workers cost per committed step", "echo2d_usd_per_step", default=None
    )


# --- counts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsStatus:
    """Groups that are in no batch yet."""

    buffered: int = described("complete groups")
    in_flight: int = described("groups with samples that have not come yet")
    queued: int = described(
        "groups that are buffered, in flight, or in batches from the open step on"
    )
    leases: int = described("Open leases", "echo2d_leases")
    tokens_under_way: int = described("tokens that the open leases have produced so far")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStatus:
    """Calls of the OpenAI-compatible endpoint."""

    calls: int = described("calls that are open")
    waiting: int = described("samples of open calls that wait for a slot")
    running: int = described("samples of open calls that are being written")
    ended: Mapping[str, int] = described(
        "Calls that ended, by outcome", "echo2d_gateway_calls", counter=True, label="outcome"
    )
    tokens: int = described("Tokens sent to callers", "echo2d_gateway_tokens", counter=True)
    handed_over: int = described(
        "Samples of calls that were continued by another worker",
        "echo2d_gateway_handed_over",
        counter=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientModelStatus:
    """A model of a client of the Tinker API."""

    model: str = described("its id in the API")
    rank: int | None = described(
        "the rank of its adapter; 0: full weights; null: it is not made yet"
    )
    steps: int = described("optimizer steps since the coordinator started")
    trained_tokens: int = described("tokens of these steps")
    train_s: float = described("seconds that the learner took for these steps")
    running: str = described("the operation that the learner runs now; empty: none")
    operations_waiting: int = described("operations that wait for the learner")
    bytes_waiting: int = described("bytes of its operations that wait or run")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus:
    """A session of a client of the Tinker API. It counts from when the coordinator started, if it is older."""

    session: str = described("its id in the API")
    caller: str = described("the name of its token")
    age_s: float = described("seconds since it was opened, or since the coordinator started")
    silent_s: float = described("seconds since the last call that keeps it")
    models: tuple[ClientModelStatus, ...] = described("its models")
    steps: int = described("optimizer steps of all its models")
    trained_tokens: int = described("tokens of these steps")
    train_s: float = described("seconds that the learner took for these steps")
    sequences: int = described("sequences that workers have drawn for it")
    sampled_tokens: int = described("tokens of these sequences")
    operations_waiting: int = described("operations that wait for the learner")
    bytes_waiting: int = described("bytes of its operations that wait or run")
    samplers: int = described("its samplers")
    drawn: int = described("samples that workers draw now")
    samples_waiting: int = described("samples that wait for workers")
    other_weights: int = described(
        "of the samples that wait, those for other weights than the ones that are served"
    )
    unscored: int = described("samples whose prompts or sequences wait to be scored")
    checkpoints: int = described("checkpoints of its models")
    cost_usd: float | None = described(
        "its share, by sampled tokens, of what the workers cost since the coordinator started, and the learner's time"
        " for its steps; null: nothing has a price"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerStatus:
    """A token of role tinker that has called since the coordinator started."""

    caller: str = described("its name")
    sessions: int = described("Its open sessions", "echo2d_tinker_sessions")
    models: int = described("Its models, which end with their sessions", "echo2d_tinker_models")
    checkpoints: int = described("its checkpoints")
    steps: int = described("Its optimizer steps", "echo2d_tinker_steps", counter=True)
    trained_tokens: int = described(
        "Tokens of its optimizer steps", "echo2d_tinker_trained_tokens", counter=True
    )
    train_s: float = described(
        "Time that the learner took for its steps", "echo2d_tinker_train_seconds", counter=True
    )
    sequences: int = described("sequences that workers have drawn for it")
    sampled_tokens: int = described(
        "Tokens that workers have drawn for it", "echo2d_tinker_sampled_tokens", counter=True
    )
    operations_waiting: int = described(
        "Its operations that wait for the learner", "echo2d_tinker_operations_waiting"
    )
    samples_waiting: int = described(
        "Its samples that wait for workers, or for the learner to score them",
        "echo2d_tinker_samples_waiting",
    )


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Weights that workers hold for clients."""

    weights: str = described(
        "whose weights these are: the path of a checkpoint, the id of a sampler, or the base model's name"
    )
    version: int = described("the version with these weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerStatus:
    """The clients of the Tinker API."""

    held: tuple[HeldWeights, ...] = described(
        "the weights that workers hold for samples; those that were published last are last"
    )
    sessions: tuple[SessionStatus, ...] = described("the open sessions")
    callers: tuple[CallerStatus, ...] = described("the callers", rows={"caller": "caller"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditStatus:
    """The audit."""

    auditors: int = described("Auditors that are connected", "echo2d_audit_auditors")
    trusts: bool = described("whether some workers are trusted")
    learnt: float = described(
        "of the trusted workers' answers that the limits need, the share that is scored"
    )
    k_max: float | None = described("the limit of K in nats; null: not learnt yet")
    misses_max: float | None = described("limit of the share of tokens that seeds do not explain")
    learnt_mixed: float | None = described(
        "like `learnt`, for answers whose KV caches may mix versions; null: no worker may refit in place"
    )
    k_max_mixed: float | None = described("limit of K if an answer's KV caches may mix versions")
    held_back: tuple[str, ...] = described(
        "quantizations whose workers get no leases, because their limits are not learnt"
    )
    pending: int = described("Parts of answers that wait for an auditor", "echo2d_audit_pending")
    waiting: int = described("Samples whose groups wait for a verdict", "echo2d_audit_waiting")
    scored: int = described("Parts of answers scored", "echo2d_audit_scored", counter=True)
    skipped: int = described("Parts of answers never scored", "echo2d_audit_skipped", counter=True)
    delay_s: float | None = described(
        "Mean time that a group waits for a verdict", "echo2d_audit_delay_seconds"
    )
    scoring_s: float = described("seconds that auditors have spent on scoring")
    loading_s: float = described("seconds that auditors have spent on loading versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesStatus:
    """Samples of an environment that no worker writes now."""

    offered: int = described(
        "Its samples that no external agent has begun", "echo2d_task_offered_samples"
    )
    parked: int = described(
        "Its samples that wait for its environment", "echo2d_task_parked_samples"
    )
    waiting: int = described(
        "Its samples that wait for a worker to write their next turn", "echo2d_task_waiting_turns"
    )
    tool_s_median: float | None = described("median seconds of the environment per step")
    tool_s_p90: float | None = described("90th percentile of the environment's seconds per step")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingStatus:
    """A task whose rewards fail."""

    failures: int = described("how many rewards failed since the last success")
    ever: bool = described("whether a reward was ever computed")
    reason: str = described("the reason of the last failure")
    stops_in_s: float | None = described("seconds until the run stops; null: it continues")
    retry_s: float | None = described(
        "seconds until the next try, while the task gets no leases; null: it gets leases"
    )
    share: float = described("of the latest answers, the share whose rewards failed", default=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """One task."""

    name: str = described("its name")
    weight: float = described("its share of the groups of a step")
    in_flight: int = described("Its groups that are not complete", "echo2d_task_groups_in_flight")
    retired: int = described("Its rows that are retired", "echo2d_task_retired_rows")
    passed: int = described(
        "Its prompts that were passed over", "echo2d_task_passed_prompts", counter=True
    )
    episodes: EpisodesStatus | None = described("null: it is no environment")
    failing: FailingStatus | None = described("null: its rewards do not fail", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStatus:
    """One [[eval]]: the newest score, and what is under way."""

    name: str = described("its name")
    version: int | None = described("Version that was scored last", "echo2d_eval_version")
    rows: int = described("how many questions the score is about")
    of: int = described("how many questions there are")
    samples: int = described("how many answers each question gets")
    mean: float | None = described("Its mean reward on held-out questions", "echo2d_eval_score")
    se: float | None = described("Standard error of its mean reward", "echo2d_eval_score_error")
    truncated: float | None = described(
        "Share of its answers that were cut off", "echo2d_eval_truncated"
    )
    tokens: float | None = described("Mean tokens of its answers", "echo2d_eval_answer_tokens")
    open_version: int | None = described("the version that is scored now")
    open_answers: int = described("how many answers of `open_version` are there")
    open_of: int = described("how many answers of `open_version` there will be")


@dataclass(frozen=True, slots=True)
class TrajectoryCounts:
    """Trajectories since the coordinator started."""

    trained: int = described("In committed steps", "echo2d_trajectories_trained", counter=True)
    dropped: int = described(
        "Given up with their groups", "echo2d_trajectories_dropped", counter=True
    )


@dataclass(frozen=True, slots=True)
class HandedOverCounts:
    """Partial samples that another worker continued."""

    partials: int = described("how many samples there were")
    tokens: int = described("how many tokens the samples had")


@dataclass(frozen=True, slots=True)
class FaultStatus:
    """A fault, and how often it was noted."""

    kind: str = described("a short word")
    text: str = described("what happened")
    times: int = described("how often")
    age_s: float = described("seconds since it was last noted")


# --- renting


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxStatus:
    """A rented box that may exist."""

    label: str = described("its name at the provider")
    provider: str = described("provider.name")
    offer: str = described("provider.offer.name")
    ids: tuple[str, ...] = described("the provider's ids for it")
    state: str = described("one of the states of `renting.states`")
    why: str = described("why it is given back; empty: it stays")
    usd_per_h: float = described("its price in usd/h")
    age_s: float = described("seconds since its start command")
    life_left_s: float = described("seconds until it ends by itself")
    cost_usd: float = described("usd so far")
    worker: str = described("the name of its worker; empty: none has joined", default="")
    idle_s: float | None = described(
        "seconds since its worker last had a lease; null: it does not serve", default=None
    )
    accepted: int = described("how many of its trajectories were accepted", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RentingStatus:
    """The rented boxes and the budget."""

    usd_per_h: float = described(
        "Price per hour of all rented boxes that may exist", "echo2d_rented_usd_per_hour"
    )
    usd_per_h_max: float = described("rent.usd_per_h")
    spent_usd: float = described(
        "What rented boxes cost in the whole run, by the renter's book", "echo2d_rented_spent_usd"
    )
    set_aside_usd: float = described(
        "What boxes may still cost until they end by themselves", "echo2d_rented_set_aside_usd"
    )
    committed_usd: float = described("spent and set aside")
    left_usd: float = described(
        "The part of the budget that is neither spent nor set aside", "echo2d_rented_left_usd"
    )
    usd_total_max: float = described("rent.usd_total")
    why: str = described("why no box is started, although more are needed")
    blind: tuple[str, ...] = described("providers whose list could not be read")
    states: Mapping[str, int] = described(
        "Rented boxes that may exist, by state", "echo2d_rented_boxes", label="state"
    )
    boxes: tuple[BoxStatus, ...] = described("the rented boxes that may exist")
    alerts: tuple[Alert, ...] = described("what is wrong with renting", default=())


# --- all of it


@dataclass(frozen=True, slots=True)
class RefusedPeerStatus:
    """A peer that broke the protocol too often."""

    id: str = described("its id")
    name: str = described("the name that it gives itself")
    refused_s: float = described("seconds for which it is still refused")
    token: str = described("the token with which it enrolled; empty: not known", default="")
    token_peers: int = described("how many peers enrolled with that token; 0: not known", default=0)


@dataclass(frozen=True, slots=True)
class OtherBuildStatus:
    """A peer that is refused because its build and the coordinator's do not understand each other."""

    id: str = described("its id")
    name: str = described("the name that it gives itself")
    build: str = described("the build of its program")
    protocol: int = described("the protocol of its control link")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What the process around the core knows."""

    run_id: str = described("the run's id")
    peer_faults: int = described(
        "Sessions closed because of what their peer sent", "echo2d_peer_faults", counter=True
    )
    learner_silent_s: float | None = described(
        "Seconds since the learner's last message; 0 while one of its calls waits; no sample: never",
        "echo2d_learner_silent_seconds",
    )
    run: RunFacts = described("what the run consists of", default=RunFacts())
    disk: DiskStatus | None = described("null until it is measured", default=None)
    expiring_tokens: tuple[TokenExpiry, ...] = described("tokens that expire soon", default=())
    renting: RentingStatus | None = described("left out where nothing is rented", default=None)
    refused_peers: tuple[RefusedPeerStatus, ...] = described(
        "peers that broke the protocol too often", default=()
    )
    build: str = described("the build of the coordinator's program", default="")
    protocol: int = described("the protocol of the coordinator's control links", default=0)
    other_builds: tuple[OtherBuildStatus, ...] = described(
        "the newest peers that are refused because of their build", default=()
    )
    other_builds_total: int = described(
        "Peers that are refused because of their build", "echo2d_other_build_peers", default=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run at one moment. Counters start over when the coordinator restarts, `totals` do not.

    Lists of durations and the bubble cover only the newest steps and versions, at most RECENT_MAX
    (`cluster/statistics.py`).
    """

    epoch: int = described("Current learner session; 0: none yet", "echo2d_epoch")
    learner: LearnerStatus = described("learner of the current session", default=LearnerStatus())
    totals: TotalsStatus = described("counts of the whole run", default=TotalsStatus())
    open_step: int = described("Lowest train step whose batch is not full", "echo2d_open_step")
    committed_step: int = described(
        "Last train step that the learner committed", "echo2d_committed_step"
    )
    checkpoint_step: int = described(
        "Last train step that is durable at the learner", "echo2d_checkpoint_step"
    )
    staleness_max: int = described("S, in train steps", "echo2d_staleness_max")
    publish_every: int = described("Current kappa, in train steps", "echo2d_publish_every")
    trajectories_per_step: int = described("policy.trajectories_per_step")
    group_size: int = described("policy.group_size")
    heartbeat_s: float = described("seconds between two signs of life of a worker")
    dissemination_bound: bool = described("whether versions are published faster than they spread")
    newest_version: VersionStatus | None = described("the newest version that was published")
    groups: GroupsStatus = described("groups that are in no batch yet")
    broadcast: BroadcastStatus | None = described("the version that spreads now")
    catch_ups: tuple[FormStatus, ...] = described("forms that only single workers fetch")
    workers: tuple[WorkerStatus, ...] = described(
        "the workers", rows={"worker": "id", "name": "name"}
    )
    provision: ProvisionStatus = described("what is needed, and what is there")
    costs: CostsStatus = described("what the workers cost", default=CostsStatus())
    relays: tuple[PeerStatus, ...] = described("the relay peers")
    seed_alive: bool = described("1 while the seed is connected", "echo2d_seed_alive")
    seed_uplink: float | None = described("measured bytes/s of the seed")
    seed_build: str | None = described("the build of the seed's program")
    gateway: GatewayStatus = described("calls of the OpenAI-compatible endpoint")
    tinker: TinkerStatus | None = described(
        "clients of the Tinker API; null: the run has tasks", default=None
    )
    audit: AuditStatus | None = described("null: the audit is off")
    tasks: tuple[TaskStatus, ...] = described("the tasks", rows={"task": "name"})
    evaluations: tuple[EvaluationStatus, ...] = described("each [[eval]]", rows={"name": "name"})
    bubble_ratio: float | None = described("the share of time for which the learner waited")
    learner_train_s: float = described(
        "Time that the learner trained", "echo2d_learner_train_seconds", counter=True
    )
    learner_wait_s: float = described(
        "Time between its commits in which the learner did not train; its share is the bubble",
        "echo2d_learner_wait_seconds",
        counter=True,
    )
    versions_published: int = described(
        "Publishes accepted", "echo2d_versions_published", counter=True
    )
    staleness: Mapping[int, int] = described("trained trajectories by staleness")
    trajectories: TrajectoryCounts = described("trajectories since the coordinator started")
    tokens_accepted: int = described(
        "Tokens of accepted results", "echo2d_tokens_accepted", counter=True
    )
    tokens_trained: int = described(
        "Written tokens in committed steps", "echo2d_tokens_trained", counter=True
    )
    handed_over: HandedOverCounts = described("samples that another worker continued")
    tokens_recomputed: int = described(
        "Tokens of prompts and outputs whose KV caches refits dropped, at all workers",
        "echo2d_tokens_recomputed",
        counter=True,
    )
    groups_dropped: Mapping[str, int] = described(
        "Groups given up, by reason", "echo2d_groups_dropped", counter=True, label="reason"
    )
    answer_tokens: Mapping[str, float] = described(
        "Mean tokens of trained answers, and of answers dropped with their groups, by reason",
        "echo2d_answer_tokens",
        label="fate",
    )
    wasted_tokens: Mapping[str, int] = described(
        "Tokens of answers that were dropped, by reason",
        "echo2d_wasted_tokens",
        counter=True,
        label="reason",
    )
    results_refused: Mapping[str, int] = described(
        "Results refused, by reason", "echo2d_results_refused", counter=True, label="reason"
    )
    rewards: tuple[tuple[int, float], ...] = described("pairs of step and mean reward")
    flat_groups: tuple[float, ...] = described(
        "for the steps of `rewards`, the share of groups with equal rewards", default=()
    )
    t_train_s: tuple[float, ...] = described(
        "Time of a train step, net of waiting", "echo2d_recent_train_step_seconds"
    )
    t_verify_s: tuple[float, ...] = described(
        "Time from an accepted publish until the last worker has verified the version",
        "echo2d_recent_t_verify_seconds",
    )
    t_bcast_s: tuple[float, ...] = described(
        "Time from an accepted publish until the last worker serves the version",
        "echo2d_recent_t_bcast_seconds",
    )
    refit_pause_s: tuple[float, ...] = described(
        "Time in which an engine generated nothing for a refit",
        "echo2d_recent_refit_pause_seconds",
    )
    recompute_s: tuple[float, ...] = described(
        "Time in which an engine recomputed KV caches after a refit",
        "echo2d_recent_recompute_seconds",
    )
    still_s: tuple[float, ...] = described(
        "Time in which workers generated nothing for a version, on average",
        "echo2d_recent_still_seconds",
    )
    seed_copies: Mapping[int, float] = described(
        "by version, how many bytes the seed sent per byte of the version"
    )
    seed_usd_per_gb_up: float = described("link.usd_per_gb_up")
    seed_usd: Mapping[int, float] = described("by version, what the seed's bytes cost")
    seed_sent_bytes: int = described(
        "Bytes that the seed sent since the coordinator started",
        "echo2d_seed_sent_bytes",
        counter=True,
    )
    seed_usd_total: float = described(
        "Price of the bytes that the seed sent", "echo2d_seed_usd", counter=True
    )
    wire_bytes: int = described(
        "Bytes of all encoded versions, each counted once", "echo2d_wire_bytes", counter=True
    )
    full_bytes: int = described(
        "Bytes of the snapshots from which versions were encoded", "echo2d_full_bytes", counter=True
    )
    version_bytes: Mapping[int, VersionBytes] = described("by version, its size")
    fault_counts: Mapping[str, int] = described(
        "Faults noted, by kind", "echo2d_faults", counter=True, label="kind"
    )
    faults: tuple[FaultStatus, ...] = described("the newest faults")
    alerts: tuple[Alert, ...] = described(
        "what is wrong: alerts about the run first, then about single workers", default=()
    )
    process: ProcessStatus | None = described("null in simulations", default=None)

    @property
    def attention(self) -> tuple[str, ...]:
        """The alerts' sentences, at most SENTENCES_MAX and a last one that counts the rest."""
        sentences = tuple(alert.sentence for alert in self.alerts)
        more = len(sentences) - SENTENCES_MAX
        return (
            sentences if more <= 0 else (*sentences[:SENTENCES_MAX], f"and {more} more like these")
        )


# --- what the owner of a worker's token may know


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPeerStatus:
    """One of the owner's boxes; a field without a meaning here means what it means in `WorkerStatus`."""

    id: str
    name: str
    kind: str
    state: str
    alive: bool
    silent_s: float
    reachable: bool | None
    quarantined: bool
    cordoned: bool
    draining: bool
    convicted: bool = described("whether the audit has convicted it")
    uplink: float | None
    payload_bytes: int = described("how many bytes it has of the version that spreads")
    verified: bool = described("whether it has all of that version, verified")
    active: bool = False
    leaving: bool = False
    serving: VersionStatus | None = None
    lag: int | None = None
    slots: int = 0
    running: int = 0
    accepted: int = 0
    trained: int = 0
    used: float = 1.0
    mu: float | None = None
    usd_per_h: float = 0.0
    cost_usd: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    attention: tuple[str, ...] = described("what is wrong with it, in sentences")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarnedStatus:
    """What boxes have earned since the run began."""

    accepted_trajectories: int = described("trajectories that were accepted", default=0)
    trained_trajectories: int = described("trajectories that were trained on", default=0)
    sent_bytes: int = described("bytes of versions that they report to have passed on", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStatus:
    """The boxes that enrolled with one token."""

    run_id: str = described("the run's id")
    committed_step: int = described("last train step that the learner committed")
    staleness_max: int = described("S, in train steps")
    newest_version: VersionStatus | None = described("the newest version that was published")
    spreading_version: int | None = described("the version that spreads now")
    spreading_bytes: int | None = described("bytes of that version; null: not encoded yet")
    peers: tuple[OwnPeerStatus, ...] = described("the boxes")
    absent: tuple[str, ...] = described("ids of boxes not seen since the coordinator started")
    convicted: tuple[str, ...] = described("ids of convicted boxes, absent ones too")
    earned: EarnedStatus = described("what all boxes earned, absent too", default=EarnedStatus())
