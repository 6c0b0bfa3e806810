"""The status of a run, as types: everything that `GET /v1/status` says, built once by the core.

The coordinator's machine builds a `Status` (`core/coordinator/status.py`), renting builds its
`RentingStatus` (`core/renting/report.py`), and the process around them adds a `ProcessStatus`.
Alerts, metrics, renting, the plan and the terminal views read these types; JSON is derived from
them in `json_form.py`.

Units: durations in seconds, uplinks in bytes/s, `mu` in trajectories/s, digests in hex.
None means "not known yet" or "there is none".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from echo2d.core.capacity.bottleneck import Bottleneck
from echo2d.core.rules.run import DisseminationMode

# One screen: what 500 silent workers have to say, a few of them say.
SENTENCES_MAX = 24

# Each has a row in docs/operating.md.
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
    """What is wrong. kind: one of ALERT_KINDS; a newer coordinator may have others. sentence: for a
    person. subject: the worker that it is about; empty: the run. peer: the id of that worker, because
    a peer may call itself like another.
    """

    kind: AlertKind
    sentence: str
    subject: str = ""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One published version. publish_seq: its place in the order of all publishes of the run."""

    version: int
    digest: str
    publish_seq: int


# --- peers


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """A worker or a relay peer.

    silent_s: since the coordinator last heard from it. reachable: whether other peers can dial it;
    None: not tested yet. quarantined: it passed on bad frames, so it only receives. misreports: of its reports, so
    many are none that an honest program sends; above 0, it is quarantined for them, and does no work. cordoned: an
    operator has taken it out of service. draining: it is to end once it holds nothing. build,
    protocol: of its program (`core/protocol/builds.py`). received_bytes, sent_bytes: of versions, since
    the coordinator started, as it says.
    """

    id: str
    name: str
    kind: str
    state: str
    alive: bool
    silent_s: float
    uplink: float | None
    quarantined: bool
    misreports: int = 0
    token: str = ""
    cordoned: bool = False
    draining: bool = False
    reachable: bool | None
    build: str
    protocol: int
    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(PeerStatus):
    """A worker: what it runs, what it serves, what it makes and what it costs.

    slots: as it offers. usable: of these, as many as it may use, because of what it delivers. tokens_per_s:
    that it delivered lately while it held something; None: not known yet. slower: how many times as
    long as usual a sample takes there; None: it delivered nothing, or nothing is known.
    leases: it holds. leased: samples in them. leases_end_s: until the first of them goes to another
    worker, if this one stays silent. lag: in versions. active: it gets leases. mu: trajectories/s
    that it makes while its slots are leased, without those that are thrown away; an expectation
    while mu_sd is None. rho: usd per trajectory. cost_usd: since the coordinator started.
    reward, answer_tokens: means over its scored
    trajectories. reward_above: its reward over that of others on the same prompts. used: the share
    of what it makes that is trained on. trained, audited, flagged: trajectories since the
    coordinator started. standing: what the audit thinks of it; empty: nothing. verdict: why it is
    convicted. refit_pause_s, recomputed_tokens, recompute_s: of its last refit (`RefitDone`).
    learner_k (nats), learner_z: means over its trajectories that the learner scored
    (`core/protocol/trajectory.py`, `TrajectoryScore`). disk_free_bytes: what new versions may
    take on its disk (`Heartbeat`); None: not said. set_aside: why it gets no leases, though no operator
    said so: the rewards of its answers fail.
    """

    slots: int
    usable: int
    tokens_per_s: float | None
    slower: float | None
    running: int
    leases: int
    leases_end_s: float | None
    leased: int
    serving: VersionStatus | None
    lag: int | None
    accepted: int
    refit_pause_s: float | None
    recomputed_tokens: int | None
    recompute_s: float | None
    memory_ok: bool | None
    active: bool
    leaving: bool
    mu: float | None
    mu_sd: float | None
    usd_per_h: float
    usd_per_gb_down: float
    usd_per_gb_up: float
    rho: float | None
    cost_usd: float = 0.0
    reward: float | None
    reward_above: float | None
    answer_tokens: float | None
    used: float
    trained: int
    audited: int
    flagged: int
    standing: str
    verdict: str
    learner_k: float | None
    learner_z: float | None
    disk_free_bytes: int | None = None
    set_aside: str = ""


# --- how versions spread


@dataclass(frozen=True, slots=True, kw_only=True)
class FormStatus:
    """One encoded form of a version. whole: it is completely encoded; wire_bytes is None before."""

    version: int
    form: str
    base_version: int | None
    whole: bool
    wire_bytes: int | None
    full_bytes: int
    shape: str | None
    predicted_s: float | None


@dataclass(frozen=True, slots=True)
class ProgressStatus:
    """How far one peer has come with a form. duplicates: frames that it received twice."""

    id: str
    name: str
    payload_bytes: int
    duplicates: int
    verified: bool
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStatus(FormStatus):
    """The form that spreads now. waiting_version: the newer version that spreads after it."""

    waiting_version: int | None
    peers: tuple[ProgressStatus, ...]


@dataclass(frozen=True, slots=True)
class VersionBytes:
    """The size of a version: as encoded, and as the snapshot that it was made from."""

    wire_bytes: int
    full_bytes: int


# --- what is needed and what is there


@dataclass(frozen=True, slots=True)
class EstimateStatus:
    """A measured number. sd: its standard error; None: too few samples. samples: it is made of."""

    value: float
    sd: float | None
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatesStatus:
    """What the run has measured of itself. discarded: the share of trajectories thrown away."""

    t_train_s: EstimateStatus | None
    t_bcast_s: EstimateStatus | None
    t_gen_s: EstimateStatus | None
    refit_pause_s: EstimateStatus | None
    recompute_s: EstimateStatus | None
    still_s: EstimateStatus | None
    wire_bytes: EstimateStatus | None
    discarded: EstimateStatus | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionStatus:
    """The throughput that the learner needs, and the throughput that the workers have.

    mu_pool: of the active workers. mu_available: of all that are here. mu_min: with which the
    learner never waits. mu_target: of the cheapest pool; why: its price, and those of the pools
    beside it. shortfall: what all workers here lack of the target; negative: what they have beyond it. bubble: the
    learner's share of waiting. gen_sigma: the spread of the logarithms of samples' lengths; None: not measured yet.
    """

    activation: str
    learner_usd_per_h: float
    mu_pool: float
    mu_min: float | None
    mu_target: float | None
    mu_available: float
    bubble_predicted: float | None
    feasible: bool | None
    why_not: str
    changes: int
    why: str
    gamma: float
    gen_sigma: float | None
    mode: DisseminationMode
    estimates: EstimatesStatus
    shortfall: float | None
    bubble: float | None
    bottleneck: Bottleneck


# --- learner and run


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """The learner whose session is in force.

    name: its identity. software: its version of echo2d; empty: it does not say that it lives. heard:
    it was, since the coordinator started. silent_s: since it was heard last, or since that start; 0
    while it waits for a batch. steps: the step after which it ends; None: it does not say. eta_s: until
    then, at the pace of the newest steps.
    """

    name: str = ""
    software: str = ""
    heard: bool = False
    silent_s: float = 0.0
    steps: int | None = None
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class TotalsStatus:
    """Of the whole run: trajectories trained and dropped, versions published. After a restart `dropped`
    goes on from the last commit before it.
    """

    trained: int = 0
    dropped: int = 0
    published: int = 0


@dataclass(frozen=True, slots=True)
class NamedTask:
    """kind: of our tasks, or the place of the operator's class."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run is about. model: the base model's directory; empty: none is named. software: the
    coordinator's version of echo2d. started_at: when the coordinator did, in seconds of the Unix clock.
    changes: sentences about what is otherwise than at the start before.
    """

    name: str = ""
    model: str = ""
    tasks: tuple[NamedTask, ...] = ()
    software: str = ""
    started_at: float = 0.0
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """Where the run's directory lies. bytes_max: run.disk_bytes_max."""

    free_bytes: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class TokenExpiry:
    """A token that expires within a week, or has within the last one: left_s is negative then."""

    name: str
    role: str
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsStatus:
    """What the workers cost by their prices. workers_usd_per_h: of those that are
    here now, without traffic. workers_usd: since the coordinator started; steps: committed since then. usd_per_step:
    None: no step was committed, or nothing costs anything.
    """

    workers_usd_per_h: float = 0.0
    workers_usd: float = 0.0
    steps: int = 0
    usd_per_step: float | None = None


# --- counts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsStatus:
    """Groups that are in no batch yet. leases: that run; tokens_under_way: in them so far."""

    buffered: int
    in_flight: int
    queued: int
    leases: int
    tokens_under_way: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStatus:
    """Calls of the OpenAI-compatible endpoint. waiting, running: samples. ended: calls, by how."""

    calls: int
    waiting: int
    running: int
    ended: Mapping[str, int]
    tokens: int
    handed_over: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditStatus:
    """The audit. auditors: connected. trusts: some workers are trusted. learnt: of the answers of
    trusted workers that limits are made of, the share that is scored. k_max, misses_max: the
    limits. learnt_mixed, k_max_mixed: the same for answers whose KV caches may mix versions; None:
    no worker may refit in place, or not learnt yet. held_back: quantizations whose workers get no
    leases, because their limits are not learnt. pending: parts of answers that wait for an
    auditor. waiting: samples whose groups wait for a verdict. scored, skipped: parts so far.
    delay_s: how long a verdict takes. scoring_s, loading_s: what auditors spent so far.
    """

    auditors: int
    trusts: bool
    learnt: float
    k_max: float | None
    misses_max: float | None
    learnt_mixed: float | None
    k_max_mixed: float | None
    held_back: tuple[str, ...]
    pending: int
    waiting: int
    scored: int
    skipped: int
    delay_s: float | None
    scoring_s: float
    loading_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesStatus:
    """Samples of an environment that no worker writes now. offered: no agent outside has begun them.
    parked: the environment is asked. waiting: for a worker that writes their next turn.
    tool_s_median, tool_s_p90: how long the environment took for a step, of the newest RECENT_MAX.
    """

    offered: int
    parked: int
    waiting: int
    tool_s_median: float | None
    tool_s_p90: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingStatus:
    """A task whose rewards fail. failures: since the last success. ever: whether a reward has come before.
    reason: of the last one. stops_in_s: until the run stops; None: it goes on. retry_s: until the next
    try, while the task gets no leases; None: it gets some. share: of the latest answers, those that failed.
    """

    failures: int
    ever: bool
    reason: str
    stops_in_s: float | None
    retry_s: float | None
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """One task. weight: its groups of a step, over those of all tasks. in_flight: groups that are
    not complete. retired: rows that `filter` passes over; passed: prompts passed over so far.
    episodes: None: it is no environment. failing: None: its rewards come.
    """

    name: str
    weight: float
    in_flight: int
    retired: int
    passed: int
    episodes: EpisodesStatus | None
    failing: FailingStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStatus:
    """One [[eval]]: the newest score, and what is under way.

    version: None: nothing is scored yet. rows: questions that the score is about, of `of`. mean:
    reward; se: its standard error. truncated: share of answers that were cut off. tokens: of an
    answer. open_version: under way; open_answers: written so far, of open_of.
    """

    name: str
    version: int | None
    rows: int
    of: int
    samples: int
    mean: float | None
    se: float | None
    truncated: float | None
    tokens: float | None
    open_version: int | None
    open_answers: int
    open_of: int


@dataclass(frozen=True, slots=True)
class TrajectoryCounts:
    """dropped: given up with their groups."""

    trained: int
    dropped: int


@dataclass(frozen=True, slots=True)
class HandedOverCounts:
    """Partial samples that went on at another worker, and their tokens."""

    partials: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FaultStatus:
    """A fault, however often it was noted. age_s: since the last time."""

    kind: str
    text: str
    times: int
    age_s: float


# --- renting


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxStatus:
    """A rented box that may be there. usd_per_h: what it is charged at. why: it is given back. worker:
    the name of its worker; empty: none has joined. idle_s: since that last had a lease; None: it does
    not serve. accepted: of its trajectories.
    """

    label: str
    provider: str
    offer: str
    ids: tuple[str, ...]
    state: str
    why: str
    usd_per_h: float
    age_s: float
    life_left_s: float
    cost_usd: float
    worker: str = ""
    idle_s: float | None = None
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RentingStatus:
    """The rented boxes and the budget.

    why: more boxes are needed, and this is why none is started. blind: providers whose list could
    not be read. left_usd: of the total, neither spent nor set aside. states: boxes by state.
    """

    usd_per_h: float
    usd_per_h_max: float
    spent_usd: float
    set_aside_usd: float
    committed_usd: float
    left_usd: float
    usd_total_max: float
    why: str
    blind: tuple[str, ...]
    states: Mapping[str, int]
    boxes: tuple[BoxStatus, ...]
    alerts: tuple[Alert, ...] = ()


# --- all of it


@dataclass(frozen=True, slots=True)
class RefusedPeerStatus:
    """A peer that broke the protocol too often, and for how long it is still refused. token: with which
    it enrolled; token_peers: how many did. Empty, 0: not known.
    """

    id: str
    name: str
    refused_s: float
    token: str = ""
    token_peers: int = 0


@dataclass(frozen=True, slots=True)
class OtherBuildStatus:
    """A peer that is refused because its build and the coordinator's do not understand each other."""

    id: str
    name: str
    build: str
    protocol: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What the process around the core knows. learner_silent_s: None before its first call. disk: None
    until it is measured.

    peer_faults: messages so far that broke the protocol. build, protocol: of the coordinator's
    program. other_builds: the newest of those that are refused for theirs, of other_builds_total.
    """

    run_id: str
    peer_faults: int
    learner_silent_s: float | None
    run: RunFacts = RunFacts()
    disk: DiskStatus | None = None
    expiring_tokens: tuple[TokenExpiry, ...] = ()
    renting: RentingStatus | None = None
    refused_peers: tuple[RefusedPeerStatus, ...] = ()
    build: str = ""
    protocol: int = 0
    other_builds: tuple[OtherBuildStatus, ...] = ()
    other_builds_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run at one moment. Counters begin anew when the coordinator does, `totals` do not.

    bubble_ratio and the lists of durations are of the newest steps and versions, at most RECENT_MAX
    (`cluster/statistics.py`). wasted_tokens: of dropped answers, by reason. staleness: trained
    trajectories by staleness. rewards: pairs of step and mean reward. flat_groups: of each of these steps,
    the share of groups whose rewards were all the same. seed_copies, version_bytes,
    seed_usd: by version. seed_sent_bytes: of all forms since the coordinator started; seed_usd_total
    is their price. alerts: those of the run before those of workers. audit: None: it is off. process: None
    for a machine without a process around it, as in simulations.
    """

    epoch: int
    learner: LearnerStatus = LearnerStatus()
    totals: TotalsStatus = TotalsStatus()
    open_step: int
    committed_step: int
    checkpoint_step: int
    staleness_max: int
    publish_every: int
    trajectories_per_step: int
    group_size: int
    heartbeat_s: float
    dissemination_bound: bool
    newest_version: VersionStatus | None
    groups: GroupsStatus
    broadcast: BroadcastStatus | None
    catch_ups: tuple[FormStatus, ...]
    workers: tuple[WorkerStatus, ...]
    provision: ProvisionStatus
    costs: CostsStatus = CostsStatus()
    relays: tuple[PeerStatus, ...]
    seed_alive: bool
    seed_uplink: float | None
    seed_build: str | None
    gateway: GatewayStatus
    audit: AuditStatus | None
    tasks: tuple[TaskStatus, ...]
    evaluations: tuple[EvaluationStatus, ...]
    bubble_ratio: float | None
    learner_train_s: float
    learner_wait_s: float
    versions_published: int
    staleness: Mapping[int, int]
    trajectories: TrajectoryCounts
    tokens_accepted: int
    handed_over: HandedOverCounts
    tokens_recomputed: int
    groups_dropped: Mapping[str, int]
    answer_tokens: Mapping[str, float]
    wasted_tokens: Mapping[str, int]
    results_refused: Mapping[str, int]
    rewards: tuple[tuple[int, float], ...]
    flat_groups: tuple[float, ...] = ()
    t_train_s: tuple[float, ...]
    t_verify_s: tuple[float, ...]
    t_bcast_s: tuple[float, ...]
    refit_pause_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    still_s: tuple[float, ...]
    seed_copies: Mapping[int, float]
    seed_usd_per_gb_up: float
    seed_usd: Mapping[int, float]
    seed_sent_bytes: int
    seed_usd_total: float
    wire_bytes: int
    full_bytes: int
    version_bytes: Mapping[int, VersionBytes]
    fault_counts: Mapping[str, int]
    faults: tuple[FaultStatus, ...]
    alerts: tuple[Alert, ...] = ()
    process: ProcessStatus | None = None

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
    """One of the owner's boxes. The fields mean what they mean in `WorkerStatus`; a relay peer serves
    and makes nothing. payload_bytes, verified: of the version that spreads.
    """

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
    convicted: bool
    uplink: float | None
    payload_bytes: int
    verified: bool
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
    attention: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarnedStatus:
    """What boxes have earned since the run began. sent_bytes: of versions that they passed on, as they say."""

    accepted_trajectories: int = 0
    trained_trajectories: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStatus:
    """The boxes that enrolled with one token. spreading_bytes: None: not encoded yet. absent: ids of
    those of which the coordinator has not heard since it started. convicted: ids, absent ones too.
    earned: by all of them, absent ones too.
    """

    run_id: str
    committed_step: int
    staleness_max: int
    newest_version: VersionStatus | None
    spreading_version: int | None
    spreading_bytes: int | None
    peers: tuple[OwnPeerStatus, ...]
    absent: tuple[str, ...]
    convicted: tuple[str, ...]
    earned: EarnedStatus = EarnedStatus()
