"""The status of a run, as types: everything that `GET /v1/status` says, built once by the core.

The coordinator's machine builds a `Status` (`core/coordinator/status.py`), renting builds its
`RentingStatus` (`core/renting/report.py`), and the process around them adds a `ProcessStatus`.
Alerts, metrics, renting, the plan and the terminal views read these types; JSON is derived from
them in `json_form.py`.

Each field says what it means, and under which name it can be scraped. Units: durations in seconds, uplinks in bytes/s,
`mu` in trajectories/s, digests in hex. None means "not known yet" or "there is none".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from echo2d.core.base.described import described
from echo2d.core.capacity.bottleneck import Bottleneck
from echo2d.core.rules.run import DisseminationMode

# One screen: what 500 silent workers have to say, a few of them say.
SENTENCES_MAX = 24

# Each has a row in docs/guide/operating.md.
AlertKind = Literal[
    "no_learner",
    "learner_silent",
    "run_finished",
    "flat_rewards",
    "learner_refuses",
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
# They say how things are, for as long as they are so: nobody need be woken for them.
NOTICES: frozenset[AlertKind] = frozenset({"run_finished", "run_changed"})


@dataclass(frozen=True, slots=True)
class Alert:
    """What is wrong."""

    kind: AlertKind = described("one of ALERT_KINDS; a newer coordinator may have others")
    sentence: str = described("for a person")
    subject: str = described("the worker that it is about; empty: the run", default="")
    # A peer may call itself like another.
    peer: str = described("the id of that worker", default="")


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One published version."""

    version: int = described("its number: the train steps in it")
    digest: str = described("of the snapshot, in hex")
    publish_seq: int = described("its place in the order of all publishes of the run")


# --- peers


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """A worker or a relay peer."""

    id: str = described("its id, which its key proves")
    name: str = described("as it calls itself")
    kind: str = described("worker or relay")
    state: str = described("joined, suspected or gone")
    alive: bool = described("whether it is connected, or was a moment ago")
    silent_s: float = described("Since it was last heard", "echo2d_worker_silent_seconds")
    uplink: float | None = described("measured bytes/s; null: not yet")
    quarantined: bool = described("it passed on bad frames, so it only receives")
    misreports: int = described(
        "reports that no honest program sends; above 0, it is quarantined and does no work",
        default=0,
    )
    token: str = described("the token with which it enrolled", default="")
    cordoned: bool = described("an operator has taken it out of service", default=False)
    draining: bool = described("it is to end once it holds nothing", default=False)
    reachable: bool | None = described("whether other peers can dial it; null: not tested yet")
    build: str = described("of its program")
    protocol: int = described("of its control link")
    received_bytes: int = described(
        "of versions, since the coordinator started, as it says", default=0
    )
    sent_bytes: int = described("likewise, passed on to others", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(PeerStatus):
    """A worker: what it runs, what it serves, what it makes and what it costs."""

    slots: int = described("Samples its engines run at once", "echo2d_worker_slots")
    usable: int = described(
        "Of its slots, those it may use, because of what it delivers", "echo2d_worker_slots_usable"
    )
    tokens_per_s: float | None = described(
        "Tokens it delivered lately while it held something", "echo2d_worker_tokens_per_second"
    )
    slower: float | None = described(
        "how many times as long as usual a sample takes there; null: it delivered nothing, or"
        " nothing is known"
    )
    running: int = described(
        "Samples now in its engines, as its last heartbeat said", "echo2d_worker_running_samples"
    )
    leases: int = described("leases that it holds")
    leases_end_s: float | None = described(
        "seconds until the first of them goes to another worker, if this one stays silent"
    )
    leased: int = described("Samples it holds", "echo2d_worker_leased_samples")
    serving: VersionStatus | None = described("the version in its engines; null: none")
    lag: int | None = described(
        "Newest published version minus the one served", "echo2d_worker_lag_versions"
    )
    accepted: int = described("Its accepted results", "echo2d_worker_accepted", counter=True)
    refit_pause_s: float | None = described(
        "seconds in which its engines generated nothing for the last refit"
    )
    recomputed_tokens: int | None = described("tokens whose KV caches that refit dropped")
    recompute_s: float | None = described("seconds in which these were computed again")
    memory_ok: bool | None = described("whether the snapshot fitted into memory; null: not said")
    active: bool = described(
        "1 while it gets leases; 0: it stands by, leaves, or is away", "echo2d_worker_active"
    )
    leaving: bool = described("it announced that it leaves")
    mu: float | None = described(
        "Its throughput while its slots are leased; the expected one until it is measured",
        "echo2d_worker_trajectories_per_second",
    )
    mu_sd: float | None = described("standard error of mu; null: mu is an expectation")
    usd_per_h: float = described("its price")
    usd_per_gb_down: float = described("usd per 10^9 bytes that it receives")
    usd_per_gb_up: float = described("usd per 10^9 bytes that it sends")
    rho: float | None = described("usd per trajectory")
    cost_usd: float = described("usd since the coordinator started", default=0.0)
    reward: float | None = described("Reward of its trajectories", "echo2d_worker_reward_mean")
    reward_above: float | None = described(
        "Its reward minus that of other workers on the same prompts",
        "echo2d_worker_reward_above_others",
    )
    answer_tokens: float | None = described("Tokens of its answers", "echo2d_worker_answer_tokens")
    used: float = described(
        "Of its trajectories that were trained on or not worth it, those that were trained on",
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
    standing: str = described("what the audit thinks of it; empty: nothing")
    verdict: str = described("why it is convicted; empty: it is not")
    learner_k: float | None = described(
        "Nats between its logprobs and the learner's, per token of its trained answers",
        "echo2d_worker_learner_k",
    )
    learner_z: float | None = described(
        "Mean Z of its trained answers by the learner; about 0 for tokens drawn from its model",
        "echo2d_worker_learner_z",
    )
    disk_free_bytes: int | None = described(
        "What new versions may take on its disk; no sample: it does not say",
        "echo2d_worker_disk_free_bytes",
        default=None,
    )
    set_aside: str = described(
        "why it gets no leases, though no operator said so: the rewards of its answers fail",
        default="",
    )


# --- how versions spread


@dataclass(frozen=True, slots=True, kw_only=True)
class FormStatus:
    """One encoding of a version."""

    version: int = described("the version that it encodes")
    form: str = described("its id, in hex")
    base_version: int | None = described("the version that it differs from; null: none")
    whole: bool = described("whether it is completely encoded")
    wire_bytes: int | None = described("bytes as encoded; null: it is not whole")
    full_bytes: int = described("bytes of the snapshot")
    shape: str | None = described("of its plan")
    predicted_s: float | None = described("seconds that its plan predicts")


@dataclass(frozen=True, slots=True)
class ProgressStatus:
    """How far one peer has come with an encoding."""

    id: str = described("of the peer")
    name: str = described("as it calls itself")
    payload_bytes: int = described("bytes that it has")
    duplicates: int = described("frames that it received twice")
    verified: bool = described("it has all of them, and they are right")
    failed: bool = described("it could not use them")


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStatus(FormStatus):
    """The encoding that spreads now."""

    waiting_version: int | None = described("the newer version that spreads after it")
    peers: tuple[ProgressStatus, ...] = described("the peers that get it")


@dataclass(frozen=True, slots=True)
class VersionBytes:
    """The size of a version."""

    wire_bytes: int = described("as encoded")
    full_bytes: int = described("as the snapshot that it was made from")


# --- what is needed and what is there


@dataclass(frozen=True, slots=True)
class EstimateStatus:
    """A measured number."""

    value: float = described("the estimate")
    sd: float | None = described("its standard error; null: too few samples")
    samples: int = described("how many it is made of")


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatesStatus:
    """What the run has measured of itself."""

    t_train_s: EstimateStatus | None = described("a train step, net of waiting")
    t_bcast_s: EstimateStatus | None = described("from a publish until the last worker serves it")
    t_gen_s: EstimateStatus | None = described("a trajectory, lease to result")
    refit_pause_s: EstimateStatus | None = described("in which a refit lets nothing be generated")
    recompute_s: EstimateStatus | None = described("in which KV caches are computed again")
    still_s: EstimateStatus | None = described("in which workers stop for a version")
    wire_bytes: EstimateStatus | None = described("of an encoded version")
    discarded: EstimateStatus | None = described("the share of trajectories thrown away")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionStatus:
    """The throughput that the learner needs, and the throughput that the workers have."""

    activation: str = described("activation.mode")
    learner_usd_per_h: float = described("activation.learner_usd_per_h")
    mu_pool: float = described(
        "Trajectories per second of the active workers, as measured", "echo2d_mu_pool"
    )
    # `echo2d_mu_min` says infinity where no number is enough.
    mu_min: float | None = described("trajectories/s with which the learner never waits")
    mu_target: float | None = described("trajectories/s of the cheapest pool")
    mu_available: float = described("trajectories/s of all workers that are here")
    bubble_predicted: float | None = described("the share of its time for which the learner waits")
    feasible: bool | None = described("whether all workers together keep the learner busy")
    why_not: str = described("if not, what would")
    changes: int = described(
        "Changes of the active workers that no event forced",
        "echo2d_activation_changes",
        counter=True,
    )
    why: str = described("what the cheapest pool costs a step, and what those beside it would")
    gamma: float = described("activation.gamma")
    gen_sigma: float | None = described(
        "the spread of the logarithms of samples' lengths; null: not measured yet"
    )
    mode: DisseminationMode = described("dissemination.mode")
    estimates: EstimatesStatus = described("what the run has measured of itself")
    shortfall: float | None = described(
        "trajectories/s that all workers here lack of the target; negative: what they have beyond it"
    )
    bubble: float | None = described("the learner's share of waiting, of the last steps")
    bottleneck: Bottleneck = described("what the run waits for now")


# --- learner and run


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """The learner whose session is in force."""

    name: str = described("its identity", default="")
    software: str = described(
        "its version of echo2d; empty: it does not say that it lives", default=""
    )
    heard: bool = described("it was, since the coordinator started", default=False)
    silent_s: float = described(
        "seconds since it was heard last, or since that start; 0 while it waits for a batch",
        default=0.0,
    )
    steps: int | None = described(
        "the step after which it ends; null: it does not say", default=None
    )
    eta_s: float | None = described(
        "seconds until then, at the pace of the newest steps", default=None
    )


@dataclass(frozen=True, slots=True)
class TotalsStatus:
    """Of the whole run. After a restart `dropped` goes on from the last commit before it."""

    trained: int = described("trajectories trained on", default=0)
    dropped: int = described("trajectories dropped", default=0)
    published: int = described("versions", default=0)


@dataclass(frozen=True, slots=True)
class NamedTask:
    """A task by its name."""

    name: str = described("its name")
    kind: str = described("of our tasks, or the place of the operator's class")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run is about."""

    name: str = described("run.name", default="")
    model: str = described("the base model's directory; empty: none is named", default="")
    tasks: tuple[NamedTask, ...] = described("its tasks", default=())
    software: str = described("the coordinator's version of echo2d", default="")
    started_at: float = described("when the coordinator started, in Unix time", default=0.0)
    changes: tuple[str, ...] = described(
        "sentences about what is otherwise than at the start before", default=()
    )


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """Where the run's directory lies."""

    free_bytes: int = described("free there")
    bytes_max: int = described("run.disk_bytes_max")


@dataclass(frozen=True, slots=True)
class TokenExpiry:
    """A token that expires within a week, or has within the last one."""

    name: str = described("its name")
    role: str = described("its role")
    left_s: float = described("seconds until it expires; negative: since it has")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsStatus:
    """What the workers cost by their prices."""

    workers_usd_per_h: float = described(
        "Price of all workers that are here, without traffic",
        "echo2d_workers_usd_per_hour",
        default=0.0,
    )
    workers_usd: float = described(
        "What workers cost since the coordinator started",
        "echo2d_workers_usd",
        counter=True,
        default=0.0,
    )
    steps: int = described("committed since then", default=0)
    usd_per_step: float | None = described(
        "The same per committed step", "echo2d_usd_per_step", default=None
    )


# --- counts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsStatus:
    """Groups that are in no batch yet."""

    buffered: int = described("complete")
    in_flight: int = described("with samples that are not there yet")
    queued: int = described(
        "groups that are buffered, in flight, or in batches from the open step on"
    )
    leases: int = described("Leases that run", "echo2d_leases")
    tokens_under_way: int = described("tokens in them so far")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStatus:
    """Calls of the OpenAI-compatible endpoint."""

    calls: int = described("calls that are open")
    waiting: int = described("their samples that wait for a slot")
    running: int = described("their samples that are written now")
    ended: Mapping[str, int] = described(
        "Calls that ended, by how", "echo2d_gateway_calls", counter=True, label="outcome"
    )
    tokens: int = described("Tokens told to callers", "echo2d_gateway_tokens", counter=True)
    handed_over: int = described(
        "Samples of calls that went on at another worker",
        "echo2d_gateway_handed_over",
        counter=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditStatus:
    """The audit."""

    auditors: int = described("Auditors that are connected", "echo2d_audit_auditors")
    trusts: bool = described("some workers are trusted")
    learnt: float = described(
        "of the answers of trusted workers that limits are made of, the share that is scored"
    )
    k_max: float | None = described("limit of K in nats; null: not learnt yet")
    misses_max: float | None = described("limit of the share of tokens that seeds do not explain")
    learnt_mixed: float | None = described(
        "as learnt, of answers whose KV caches may mix versions; null: no worker may refit in place"
    )
    k_max_mixed: float | None = described("their limit of K")
    held_back: tuple[str, ...] = described(
        "quantizations whose workers get no leases, because their limits are not learnt"
    )
    pending: int = described("Parts of answers that wait for an auditor", "echo2d_audit_pending")
    waiting: int = described("Samples whose groups wait for a verdict", "echo2d_audit_waiting")
    scored: int = described("Parts of answers scored", "echo2d_audit_scored", counter=True)
    skipped: int = described("Parts of answers given up", "echo2d_audit_skipped", counter=True)
    delay_s: float | None = described(
        "How long a group waits for a verdict, mean", "echo2d_audit_delay_seconds"
    )
    scoring_s: float = described("seconds for which auditors scored so far")
    loading_s: float = described("seconds for which auditors loaded versions so far")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesStatus:
    """Samples of an environment that no worker writes now."""

    offered: int = described(
        "Its samples that no agent outside has begun", "echo2d_task_offered_samples"
    )
    parked: int = described(
        "Its samples that wait for its environment", "echo2d_task_parked_samples"
    )
    waiting: int = described(
        "Its samples that wait for a worker to write their next turn", "echo2d_task_waiting_turns"
    )
    tool_s_median: float | None = described("seconds that the environment took for a step, median")
    tool_s_p90: float | None = described("and of the 90th percentile")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingStatus:
    """A task whose rewards fail."""

    failures: int = described("since the last success")
    ever: bool = described("whether a reward has come before")
    reason: str = described("of the last failure")
    stops_in_s: float | None = described("seconds until the run stops; null: it goes on")
    retry_s: float | None = described(
        "seconds until the next try, while the task gets no leases; null: it gets some"
    )
    share: float = described("of the latest answers, those that failed", default=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """One task."""

    name: str = described("its name")
    weight: float = described("its groups of a step, over those of all tasks")
    in_flight: int = described("Its groups that are not complete", "echo2d_task_groups_in_flight")
    retired: int = described("Its rows that are retired", "echo2d_task_retired_rows")
    passed: int = described(
        "Its prompts that were passed over", "echo2d_task_passed_prompts", counter=True
    )
    episodes: EpisodesStatus | None = described("null: it is no environment")
    failing: FailingStatus | None = described("null: its rewards come", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStatus:
    """One [[eval]]: the newest score, and what is under way."""

    name: str = described("its name")
    version: int | None = described("Version that was scored last", "echo2d_eval_version")
    rows: int = described("questions that the score is about")
    of: int = described("questions that there are")
    samples: int = described("answers to each question")
    mean: float | None = described("Its mean reward on held-out questions", "echo2d_eval_score")
    se: float | None = described("Standard error of that score", "echo2d_eval_score_error")
    truncated: float | None = described(
        "Share of its answers that were cut off", "echo2d_eval_truncated"
    )
    tokens: float | None = described("Tokens of one of its answers", "echo2d_eval_answer_tokens")
    open_version: int | None = described("the version that is scored now")
    open_answers: int = described("its answers so far")
    open_of: int = described("its answers in all")


@dataclass(frozen=True, slots=True)
class TrajectoryCounts:
    """Trajectories since the coordinator started."""

    trained: int = described("In committed steps", "echo2d_trajectories_trained", counter=True)
    dropped: int = described(
        "Given up with their groups", "echo2d_trajectories_dropped", counter=True
    )


@dataclass(frozen=True, slots=True)
class HandedOverCounts:
    """Partial samples that went on at another worker."""

    partials: int = described("such samples")
    tokens: int = described("their tokens")


@dataclass(frozen=True, slots=True)
class FaultStatus:
    """A fault, however often it was noted."""

    kind: str = described("a short word")
    text: str = described("what happened")
    times: int = described("how often")
    age_s: float = described("seconds since the last time")


# --- renting


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxStatus:
    """A rented box that may be there."""

    label: str = described("its name at the provider")
    provider: str = described("provider.name")
    offer: str = described("provider.offer.name")
    ids: tuple[str, ...] = described("the provider's ids of it")
    state: str = described("where it is in its life")
    why: str = described("why it is given back")
    usd_per_h: float = described("what it is charged at")
    age_s: float = described("seconds since its start command")
    life_left_s: float = described("seconds until it ends by itself")
    cost_usd: float = described("usd so far")
    worker: str = described("the name of its worker; empty: none has joined", default="")
    idle_s: float | None = described(
        "seconds since that last had a lease; null: it does not serve", default=None
    )
    accepted: int = described("its accepted trajectories", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RentingStatus:
    """The rented boxes and the budget."""

    usd_per_h: float = described(
        "Price of all rented boxes that may be there", "echo2d_rented_usd_per_hour"
    )
    usd_per_h_max: float = described("rent.usd_per_h")
    spent_usd: float = described(
        "Spent on rented boxes in the whole run, by its book", "echo2d_rented_spent_usd"
    )
    set_aside_usd: float = described(
        "What boxes may still cost until they end by themselves", "echo2d_rented_set_aside_usd"
    )
    committed_usd: float = described("spent and set aside")
    left_usd: float = described(
        "Of the budget, neither spent nor set aside", "echo2d_rented_left_usd"
    )
    usd_total_max: float = described("rent.usd_total")
    why: str = described("why none is started, though more boxes are needed")
    blind: tuple[str, ...] = described("providers whose list could not be read")
    states: Mapping[str, int] = described(
        "Rented boxes that may be there, by state", "echo2d_rented_boxes", label="state"
    )
    boxes: tuple[BoxStatus, ...] = described("each of them")
    alerts: tuple[Alert, ...] = described("what is wrong with renting", default=())


# --- all of it


@dataclass(frozen=True, slots=True)
class RefusedPeerStatus:
    """A peer that broke the protocol too often."""

    id: str = described("its id")
    name: str = described("as it calls itself")
    refused_s: float = described("seconds for which it is still refused")
    token: str = described("with which it enrolled; empty: not known", default="")
    token_peers: int = described("how many enrolled with that; 0: not known", default=0)


@dataclass(frozen=True, slots=True)
class OtherBuildStatus:
    """A peer that is refused because its build and the coordinator's do not understand each other."""

    id: str = described("its id")
    name: str = described("as it calls itself")
    build: str = described("of its program")
    protocol: int = described("of its control link")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What the process around the core knows."""

    run_id: str = described("the run's id")
    peer_faults: int = described(
        "Sessions closed for what their peer sent", "echo2d_peer_faults", counter=True
    )
    learner_silent_s: float | None = described(
        "Since the learner was last heard; 0 while a call of it waits; no sample: never",
        "echo2d_learner_silent_seconds",
    )
    run: RunFacts = described("what the run is about", default=RunFacts())
    disk: DiskStatus | None = described("null until it is measured", default=None)
    expiring_tokens: tuple[TokenExpiry, ...] = described("tokens that expire soon", default=())
    renting: RentingStatus | None = described("left out where nothing is rented", default=None)
    refused_peers: tuple[RefusedPeerStatus, ...] = described(
        "peers that broke the protocol too often", default=()
    )
    build: str = described("of the coordinator's program", default="")
    protocol: int = described("of the coordinator's control links", default=0)
    other_builds: tuple[OtherBuildStatus, ...] = described(
        "the newest peers that are refused for their build", default=()
    )
    other_builds_total: int = described(
        "Peers that are refused because of their build", "echo2d_other_build_peers", default=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run at one moment. Counters begin anew when the coordinator does, `totals` do not.

    Lists of durations and the bubble are of the newest steps and versions, at most RECENT_MAX
    (`cluster/statistics.py`).
    """

    epoch: int = described("Learner session in force; 0: none yet", "echo2d_epoch")
    learner: LearnerStatus = described("whose session that is", default=LearnerStatus())
    totals: TotalsStatus = described("counts of the whole run", default=TotalsStatus())
    open_step: int = described("Lowest train step whose batch is not full", "echo2d_open_step")
    committed_step: int = described(
        "Last train step that the learner committed", "echo2d_committed_step"
    )
    checkpoint_step: int = described(
        "Last train step that is durable at the learner", "echo2d_checkpoint_step"
    )
    staleness_max: int = described("S, in train steps", "echo2d_staleness_max")
    publish_every: int = described("kappa in force, in train steps", "echo2d_publish_every")
    trajectories_per_step: int = described("policy.trajectories_per_step")
    group_size: int = described("policy.group_size")
    heartbeat_s: float = described("seconds between two signs of life of a worker")
    dissemination_bound: bool = described("versions are published faster than they spread")
    newest_version: VersionStatus | None = described("the newest version that was published")
    groups: GroupsStatus = described("groups that are in no batch yet")
    broadcast: BroadcastStatus | None = described("the version that spreads now")
    catch_ups: tuple[FormStatus, ...] = described("encodings that single workers fetch")
    workers: tuple[WorkerStatus, ...] = described(
        "the workers", rows={"worker": "id", "name": "name"}
    )
    provision: ProvisionStatus = described("what is needed, and what is there")
    costs: CostsStatus = described("what the workers cost", default=CostsStatus())
    relays: tuple[PeerStatus, ...] = described("the relay peers")
    seed_alive: bool = described("1 while the seed can be spoken to", "echo2d_seed_alive")
    seed_uplink: float | None = described("measured bytes/s of the seed")
    seed_build: str | None = described("of the seed's program")
    gateway: GatewayStatus = described("calls of the OpenAI-compatible endpoint")
    audit: AuditStatus | None = described("null: it is off")
    tasks: tuple[TaskStatus, ...] = described("the tasks", rows={"task": "name"})
    evaluations: tuple[EvaluationStatus, ...] = described("each [[eval]]", rows={"name": "name"})
    bubble_ratio: float | None = described("the learner's share of waiting")
    learner_train_s: float = described(
        "Time the learner trained", "echo2d_learner_train_seconds", counter=True
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
    trajectories: TrajectoryCounts = described("since the coordinator started")
    tokens_accepted: int = described(
        "Tokens of accepted results", "echo2d_tokens_accepted", counter=True
    )
    handed_over: HandedOverCounts = described("what went on at another worker")
    tokens_recomputed: int = described(
        "Prompts and outputs whose KV caches refits dropped, of all workers",
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
        "of each of these steps, the share of groups whose rewards were all the same", default=()
    )
    t_train_s: tuple[float, ...] = described(
        "Train steps, net of waiting", "echo2d_recent_train_step_seconds"
    )
    t_verify_s: tuple[float, ...] = described(
        "Publish accepted until the last worker has verified the version",
        "echo2d_recent_t_verify_seconds",
    )
    t_bcast_s: tuple[float, ...] = described(
        "Publish accepted until the last worker serves the version",
        "echo2d_recent_t_bcast_seconds",
    )
    refit_pause_s: tuple[float, ...] = described(
        "Time in which an engine generated nothing for a refit",
        "echo2d_recent_refit_pause_seconds",
    )
    recompute_s: tuple[float, ...] = described(
        "Time in which an engine computed KV caches again after a refit",
        "echo2d_recent_recompute_seconds",
    )
    still_s: tuple[float, ...] = described(
        "Time in which workers generated nothing for a version, on average",
        "echo2d_recent_still_seconds",
    )
    seed_copies: Mapping[int, float] = described(
        "by version, bytes that the seed sent per byte of it"
    )
    seed_usd_per_gb_up: float = described("link.usd_per_gb_up")
    seed_usd: Mapping[int, float] = described("by version, what the seed's bytes cost")
    seed_sent_bytes: int = described(
        "Bytes that the seed sent since the coordinator started",
        "echo2d_seed_sent_bytes",
        counter=True,
    )
    seed_usd_total: float = described(
        "What these cost, by link.usd_per_gb_up", "echo2d_seed_usd", counter=True
    )
    wire_bytes: int = described(
        "Bytes of all encoded versions, each counted once", "echo2d_wire_bytes", counter=True
    )
    full_bytes: int = described(
        "Bytes of the snapshots from which these were encoded", "echo2d_full_bytes", counter=True
    )
    version_bytes: Mapping[int, VersionBytes] = described("by version, its size")
    fault_counts: Mapping[str, int] = described(
        "Faults noted, by kind", "echo2d_faults", counter=True, label="kind"
    )
    faults: tuple[FaultStatus, ...] = described("the newest of them")
    alerts: tuple[Alert, ...] = described(
        "what is wrong, with the run before single workers", default=()
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
    """One of the owner's boxes; fields of the same name mean what they mean in `WorkerStatus`."""

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
    convicted: bool = described("the audit has convicted it")
    uplink: float | None
    payload_bytes: int = described("bytes that it has of the version that spreads")
    verified: bool = described("it has all of it")
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

    accepted_trajectories: int = described("accepted", default=0)
    trained_trajectories: int = described("trained on", default=0)
    sent_bytes: int = described("of versions that they passed on, as they say", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStatus:
    """The boxes that enrolled with one token."""

    run_id: str = described("the run's id")
    committed_step: int = described("last train step that the learner committed")
    staleness_max: int = described("S, in train steps")
    newest_version: VersionStatus | None = described("the newest version that was published")
    spreading_version: int | None = described("the version that spreads now")
    spreading_bytes: int | None = described("its bytes; null: not encoded yet")
    peers: tuple[OwnPeerStatus, ...] = described("the boxes")
    absent: tuple[str, ...] = described("ids of those not heard of since the coordinator started")
    convicted: tuple[str, ...] = described("ids of those that are convicted, absent ones too")
    earned: EarnedStatus = described("by all of them, absent ones too", default=EarnedStatus())
