"""The alerts of a run: sentences that tell a person what is wrong, the most serious first.

It reads a `Status` and decides nothing. There are no alerts when all is well.
"""

from collections.abc import Iterable, Iterator

from echo2d.core.cluster.membership import PEER_GONE_S
from echo2d.core.status.schema import (
    Alert,
    AlertKind,
    AuditStatus,
    FailingStatus,
    PeerStatus,
    Status,
    WorkerStatus,
)

# The alert about slow broadcasts comes only after this many broadcasts: the first version is sent in full,
# and later ones may be too, so early broadcasts are slow without anything being wrong.
BROADCASTS_MIN = 16
# Once the audit has got this many parts of answers, at most this share of them may be left unscored.
AUDITS_MIN = 100
SKIPPED_SHARE_MAX = 0.1
# The mean difference, in nats, between the learner's logprobs and a worker's. Staleness and rounding
# make hundredths.
LEARNER_K_MAX = 1.0
# A worker counts as slow if a sample takes this many times as long as usual there, or if it delivers
# this many times less than the others on average and offers this many times more slots than it may use.
SLOWER_MIN = 8.0
NAMES_MAX = 3
# The alert comes after this many train steps in a row in which at least this share of the groups had
# equal rewards.
FLAT_STEPS = 8
FLAT_SHARE_MIN = 0.9
# A fault that a program reported is shown for this many seconds.
TOLD_S = 120.0


def alerts(status: Status) -> Iterator[Alert]:
    """The alerts about the run, then those about workers."""
    yield from _of_the_run(status)
    yield from _of_workers(status)


def _of_the_run(status: Status) -> Iterator[Alert]:
    finished = _is_finished(status)
    if not status.epoch:
        yield Alert("no_learner", "no learner has opened a session")
    elif finished:
        yield _finished(status)
    elif status.learner.silent_s > _silence_max_s(status):
        yield _learner_silent(status)
    yield from _of_training(status)
    if not status.seed_alive:
        yield Alert(
            "seed_away",
            "the seed is away: versions spread only from worker to worker until it is back",
        )
    encode = [each for each in status.faults if each.kind == "encode" and each.age_s < TOLD_S]
    if encode:
        yield Alert("seed_cannot_encode", f"the seed cannot send versions: {encode[-1].text}")
    if not finished and not any(worker.alive for worker in status.workers):
        yield Alert("no_workers", "no worker is here: nothing is generated")
    if status.dissemination_bound and len(status.t_bcast_s) > BROADCASTS_MIN:
        steps = status.staleness_max + 1
        yield Alert(
            "slow_broadcasts",
            f"a broadcast takes longer than S + 1 = {steps} train steps: the learner waits for data",
        )
    if status.audit is not None:
        yield from _of_the_audit(status.audit, status.workers)


def _is_finished(status: Status) -> bool:
    steps = status.learner.steps
    evaluates = any(each.open_version is not None for each in status.evaluations)
    return steps is not None and status.committed_step >= steps and not evaluates


def _finished(status: Status) -> Alert:
    here = sum(worker.alive for worker in status.workers)
    workers = "1 worker is" if here == 1 else f"{here} workers are"
    go_on = (
        f"{workers} still here, and what they cost is wasted: stop them, or "
        if here
        else "to go on, "
    )
    return Alert(
        "run_finished",
        f"the run is finished, step {status.committed_step} of {status.learner.steps}: {go_on}"
        "raise learner.steps and start the learner with --resume; `echo2d keep export` writes the model",
    )


def _silence_max_s(status: Status) -> float:
    if status.learner.software or not status.learner.heard:
        # Our learner sends a sign of life every few seconds (`client.ALIVE_EVERY_S`).
        return 20.0
    # A learner that sends no signs of life calls only at the end of each train step.
    return max(120.0, 5.0 * max(status.t_train_s, default=0.0))


def _learner_silent(status: Status) -> Alert:
    learner = status.learner
    of = "" if learner.steps is None else f" of {learner.steps}"
    after, how = f", after step {status.committed_step}{of}", "--resume"
    if status.tinker is not None:
        after, how = "", "--serve"
    since = "" if learner.heard else ", since the coordinator started"
    return Alert(
        "learner_silent",
        f"the learner is silent for {learner.silent_s:.0f} s{since}{after}: it has ended, "
        f"hangs, or cannot reach the coordinator; look at its log, and start it with {how}",
    )


def _of_training(status: Status) -> Iterator[Alert]:
    for task in status.tasks:
        if task.failing is not None:
            yield Alert("rewards_fail", _failing(task.name, task.failing))
    newest = status.flat_groups[-FLAT_STEPS:]
    if len(newest) == FLAT_STEPS and min(newest) >= FLAT_SHARE_MIN:
        _, reward = status.rewards[-1]
        yield Alert(
            "flat_rewards",
            f"all answers to a prompt get the same reward, for {FLAT_STEPS} train steps (mean {reward:.3f}): "
            "nothing is learnt from them; look at `echo2d samples`, at the reward, and at how hard the "
            "prompts are",
        )
    refusals = [each for each in status.faults if each.kind == "refusal"]
    if refusals and refusals[-1].age_s < TOLD_S:
        yield Alert(
            "learner_refuses",
            f"the learner refuses groups, and their work is lost: {refusals[-1].text}",
        )
    if truncated := status.learner.figures.truncated:
        yield Alert(
            "learner_truncates",
            f"the learner trains only the first tokens of {truncated:.1%} of the last step's answers: "
            "its rows have no room for the rest (learner.row_tokens_max; --plan says what fits)",
        )


def _failing(task: str, failing: FailingStatus) -> str:
    said = f"the rewards of task {task} fail, {failing.failures} in a row: {failing.reason}"
    if failing.stops_in_s is None:
        return (
            f"the reward of task {task} fails for {failing.share:.0%} of the answers, which are left out: "
            f"{failing.reason}"
        )
    if failing.retry_s is not None:
        return (
            f"{said}; it gets no leases, and is asked again in {failing.retry_s:.0f} s; the run stops in "
            f"{failing.stops_in_s / 60:.0f} minutes unless a reward comes"
        )
    if not failing.ever:
        return f"{said}; none has come yet, and the run stops unless one does"
    return said


def _of_the_audit(audit: AuditStatus, workers: Iterable[WorkerStatus]) -> Iterator[Alert]:
    if not audit.trusts:
        yield Alert(
            "nobody_trusted",
            "the audit convicts no worker, because none is trusted: create a token for a box of "
            "yours, and name it in audit.trusted",
        )
    trusted = any(worker.alive and worker.standing == "trusted" for worker in workers)
    if audit.trusts and audit.learnt < 1 and not trusted:
        yield Alert(
            "no_trusted_worker",
            "no trusted worker is here: other workers get no leases before it has shown what honest "
            "answers look like",
        )
    for quantization in audit.held_back:
        yield Alert(
            "quantization_held_back",
            f"{quantization} workers get no leases before a trusted worker in {quantization} has "
            "shown what honest answers look like",
        )
    if not audit.auditors and audit.waiting:
        yield Alert(
            "no_auditor",
            f"no auditor is here, and {audit.waiting} answers wait for their verdict",
        )
    done = audit.scored + audit.skipped
    if done >= AUDITS_MIN and audit.skipped > SKIPPED_SHARE_MAX * done:
        yield Alert(
            "auditor_behind",
            f"the auditor cannot keep up: {audit.skipped} of {done} answers were never scored; "
            "give it a faster audit.device, or lower audit.share",
        )


def _of_workers(status: Status) -> Iterator[Alert]:
    """Silent workers come first, those that hold the most leases before the others."""
    yield from (_convicted(worker) for worker in status.workers if worker.verdict)
    peers = (*status.workers, *status.relays)
    yield from (_misreports(peer) for peer in peers if peer.misreports)
    workers = [
        worker
        for worker in status.workers
        if worker.state != "gone" and not _left_as_announced(worker)
    ]
    yield from (_set_aside(worker) for worker in workers if worker.set_aside)
    silent = [worker for worker in workers if _silent(worker, status)]
    for worker in sorted(silent, key=lambda worker: (-worker.leases, -worker.silent_s)):
        sentence = f"{worker.name} silent for {worker.silent_s:.0f} s: {_consequence(worker)}"
        yield Alert("worker_silent", sentence, worker.name, worker.id)
    version_bytes = largest_version_bytes(status)
    for worker in workers:
        if not _silent(worker, status):
            yield from _of_one(worker, status)
            yield from _of_its_disk(worker, version_bytes)
    broadcast = status.broadcast
    for peer in broadcast.peers if broadcast is not None else ():
        if peer.failed:
            assert broadcast is not None
            sentence = f"{peer.name} could not apply version {broadcast.version}; it tries again"
            yield Alert("worker_cannot_apply", sentence, peer.name, peer.id)


def worker_alerts(worker: WorkerStatus, status: Status) -> list[str]:
    """Sentences that tell the worker's owner what is wrong with it, without its name."""
    if _left_as_announced(worker) or worker.state == "gone":
        return []
    if _silent(worker, status):
        return [f"silent for {worker.silent_s:.0f} s: {_consequence(worker)}"]
    found = [*_of_one(worker, status), *_of_its_disk(worker, largest_version_bytes(status))]
    return [alert.sentence.removeprefix(f"{worker.name} ") for alert in found]


def _left_as_announced(worker: WorkerStatus) -> bool:
    retires = worker.leaving or worker.cordoned
    return retires and not worker.alive and not worker.leases


def _silent(worker: WorkerStatus, status: Status) -> bool:
    # A worker that misses two heartbeats is mentioned; after a third it is suspected.
    return not worker.alive or worker.silent_s > 2 * status.heartbeat_s


def _consequence(worker: WorkerStatus) -> str:
    if worker.leases_end_s is None:
        return f"it has no leases, and is given up at {PEER_GONE_S:.0f} s"
    theirs = "its lease goes" if worker.leases == 1 else f"its {worker.leases} leases go"
    return f"{theirs} to others in {max(0.0, worker.leases_end_s):.0f} s"


def _convicted(worker: WorkerStatus) -> Alert:
    return Alert(
        "worker_convicted",
        f"{worker.name} is convicted ({worker.verdict}); `echo2d worker audit {worker.id}` has the "
        "evidence",
        worker.name,
        worker.id,
    )


def _set_aside(worker: WorkerStatus) -> Alert:
    return Alert(
        "worker_set_aside",
        f"{worker.name} is set aside: the rewards of all its answers fail, while those of expected answers do not: "
        f"{worker.set_aside}; mend the reward, or look at that box, and type `echo2d worker uncordon {worker.name}`",
        worker.name,
        worker.id,
    )


def _misreports(peer: PeerStatus) -> Alert:
    return Alert(
        "worker_misreports",
        f"{peer.name} is quarantined and does no work: an honest worker never sends {peer.misreports} of its reports "
        "(impossible results, invented leases or accusations); its engine is broken, or it lies: "
        f"`echo2d token revoke {peer.token}` ends its access, and that of every peer with the same token",
        peer.name,
        peer.id,
    )


def _of_one(worker: WorkerStatus, status: Status) -> Iterator[Alert]:
    def about(kind: AlertKind, words: str) -> Alert:
        return Alert(kind, f"{worker.name} {words}", worker.name, worker.id)

    serving, lag = worker.serving, worker.lag
    if worker.quarantined:
        yield about(
            "worker_quarantined",
            "is quarantined: frames that it passed on were bad, so it only receives",
        )
    if worker.learner_k is not None and worker.learner_k > LEARNER_K_MAX:
        yield about(
            "worker_logprobs",
            f"reports logprobs that are not the model's: the learner finds {worker.learner_k:.1f} "
            "nats a token between them and its own",
        )
    if worker.standing == "suspected":
        yield about(
            "worker_suspected",
            f"looks like a liar: {worker.flagged} of {worker.audited} audited answers are wrong; "
            "nothing follows, because no worker is trusted",
        )
    if not (worker.cordoned or worker.leaving) and (slowness := _slowness(worker, status)):
        yield about("worker_slow", slowness)
    if serving is None and status.newest_version is not None:
        yield about("worker_no_version", "serves no version yet")
    if serving is not None and lag is not None and lag > status.staleness_max:
        yield about(
            "worker_stale",
            f"serves version {serving.version}, {lag} behind the newest: too old for new leases"
            f"{_why_stale(worker, status)}",
        )
    if worker.memory_ok is False:
        yield about(
            "worker_memory",
            "has weights in its engine's memory that are not those of its version",
        )


def _why_stale(worker: WorkerStatus, status: Status) -> str:
    """What the worker lately reported about versions; empty: it reported nothing, so it is slow."""
    told = [
        each.text.partition(": ")[2]
        for each in status.faults
        if each.kind in ("apply", "refit")
        and each.text.startswith(f"{worker.name}: ")
        and each.age_s < TOLD_S
    ]
    return f"; it says: {told[-1]}" if told else ""


def _slowness(worker: WorkerStatus, status: Status) -> str:
    """What makes this worker slow; empty: the worker is not slow, or nothing is known."""
    if worker.tokens_per_s is None:
        return ""
    rate = worker.tokens_per_s
    rates = [
        each.tokens_per_s for each in status.workers if each.tokens_per_s and each is not worker
    ]
    others = sum(rates) / len(rates) if rates else 0.0
    takes_long = rate == 0.0 or ((worker.slower or 0.0) >= SLOWER_MIN and 2.0 * rate < others)
    offers_much = SLOWER_MIN * worker.usable <= worker.slots and SLOWER_MIN * rate <= others
    if not others or not (takes_long or offers_much):
        return ""
    idle = [each.name for each in status.workers if each.active and each.alive and not each.leased]
    waits = f"; without work: {', '.join(idle[:NAMES_MAX])}" if idle else ""
    more = f" and {len(idle) - NAMES_MAX} more" if len(idle) > NAMES_MAX else ""
    return (
        f"holds {worker.leased} samples and delivers {rate:.1f} tokens/s, others {others:.0f} on average: "
        f"it may use {worker.usable} of the {worker.slots} slots that it offers{waits}{more}"
    )


def _of_its_disk(worker: WorkerStatus, version_bytes: int) -> Iterator[Alert]:
    needed = 2 * version_bytes  # two slots
    if worker.disk_free_bytes is not None and worker.disk_free_bytes < needed:
        yield Alert(
            "worker_disk_low",
            f"{worker.name} has {_size(worker.disk_free_bytes)} of disk left, and two versions of this "
            f"run may take {_size(needed)}: one that does not fit is not applied; make room there, or raise "
            "worker.disk_bytes_max",
            worker.name,
            worker.id,
        )


def largest_version_bytes(status: Status) -> int:
    """The uncompressed size of the largest of the last versions; 0: none is encoded yet."""
    return max((each.full_bytes for each in status.version_bytes.values()), default=0)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
