"""The coordinator's process around the core: it turns the world into events, and performs actions.

    control links, HTTP calls, tasks, clock --> mailbox --> core.handle, up to 256 events a turn
    a turn: 1. all Persists in one transaction, on the ledger's thread
            2. then the other actions in order, none of which waits

An action that takes time (a prompt, a reward, deleting a version) becomes a task that ends in an
event. If a Persist fails, the process ends before anything is acknowledged. When told to stop, it
handles the events that have come, commits and answers them, and tells all other callers to come
back. Not here: any decision about the run.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, assert_never

from echo2d.core.audit.events import AuditTold, Convict
from echo2d.core.base.ids import Digest, Epoch, PeerId, RequestId, Version
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import (
    CloseSession,
    CopyLost,
    DeleteVersion,
    DialBack,
    DialBackEnded,
    Note,
    PeerPardoned,
    PeerRevoked,
    Persist,
    PublishAsked,
    RemovalPlanned,
    Send,
    StopRun,
    SyncVersion,
    VersionPublished,
)
from echo2d.core.cluster.step_history import StepSummary
from echo2d.core.coordinator.events import (
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorRecord,
    DeadlinePassed,
    Reply,
    WorkerOrder,
    WorkerOrdered,
)
from echo2d.core.coordinator.own_status import own_status
from echo2d.core.coordinator.process_alerts import process_alerts
from echo2d.core.protocol.addresses import IpNetwork
from echo2d.core.protocol.control_messages import SignedRoot
from echo2d.core.status.json_form import plain, status_json
from echo2d.core.status.schema import (
    DiskStatus,
    EarnedStatus,
    OtherBuildStatus,
    ProcessStatus,
    RefusedPeerStatus,
    RentingStatus,
    RunFacts,
    Status,
    TokenExpiry,
)
from echo2d.core.weights.manifest import Manifest
from echo2d.core.work.calls.events import CallRefused, ChoiceGrew
from echo2d.core.work.events import (
    BatchCommitted,
    DrawPrompt,
    ForgetEpisode,
    ProbeRewards,
    PromptDrawn,
    ScoreSample,
    StepEnvironment,
)
from echo2d.errors import Fault, OperatorFault, StoreFault, first_fault
from echo2d.logs import say
from echo2d.net.control.server import Sessions
from echo2d.net.http.costly_answer import CostlyAnswer
from echo2d.net.peer.dial_back import dial_back
from echo2d.net.security.auth import Caller, Denied, KnownPeer, Role, sign_root
from echo2d.net.security.tls import Tls
from echo2d.runtime.audit.audit_log import audit_record
from echo2d.runtime.box.wheel import GivenWheel
from echo2d.runtime.coordinator.data_plane import DataPlane
from echo2d.runtime.coordinator.gateway import Gateway
from echo2d.runtime.coordinator.group_log import GroupLog
from echo2d.runtime.coordinator.live_page import LivePage, PageMachine
from echo2d.runtime.coordinator.metrics import CoordinatorMetrics
from echo2d.runtime.coordinator.run_history import RunHistory
from echo2d.runtime.coordinator.sample_log import SampleLog
from echo2d.runtime.coordinator.shown_samples import ShownSamples
from echo2d.runtime.process.mailbox import EVENTS_MAX, EVENTS_PER_TURN_MAX, Mailbox
from echo2d.runtime.process.pending_requests import PendingRequests
from echo2d.runtime.run_dir.access_table import AccessTable, Enrolment
from echo2d.runtime.run_dir.enrolments import Enrolments
from echo2d.runtime.run_dir.ledger_thread import LedgerThread
from echo2d.runtime.run_dir.operator_log import OperatorNews
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE, RunDirectory
from echo2d.runtime.run_dir.version_files import VersionFiles
from echo2d.sd_notify import Notifier
from echo2d.store.json_log import JsonLog
from echo2d.this_build import THIS_BUILD

# The access table is reread this often, so a revoked token works no longer than this.
ACCESS_RELOAD_S = 1.0
# A token that expires within a week is told.
EXPIRY_TOLD_S = 7 * 86400.0
# If the loop sees a deadline this late, the whole process stood still. Heartbeats then wait unread
# in its sockets, and the loop reads them before the core suspects a worker.
LOOP_LATE_S = 1.0
# Rounds of the event loop for reading them: one reads the sockets, one makes events, and the others
# wait for room in the mailbox.
LATE_ROUNDS = 4
# Turns after a stop: enough for a full mailbox. The bound is needed as events may keep coming.
LAST_TURNS_MAX = EVENTS_MAX // EVENTS_PER_TURN_MAX
# A turn waits for the ledger's disk. One that takes longer than this is stuck, and so is the run.
_STUCK_S = 30.0
# If no version follows for this long, the last one is made to survive a power failure.
SYNC_LAST_S = 60.0
# A stop waits no longer than this for the last version: STOP_S_MAX in `process/lifecycle.py` is 30 s.
SYNC_AT_END_S_MAX = 20.0
# What audits found and is not written yet; beyond it the newest is left out of the log.
AUDITED_MAX = 4096
# Peers of other builds that a status names; it counts all of them.
OTHER_BUILDS_SHOWN_MAX = 500

log = logging.getLogger("echo2d.coordinator")


Emit = Callable[[CoordinatorEvent], Awaitable[None]]


class _StoppedError(Exception):
    """Ends the task group in order; it never leaves this module."""


class Machine(PageMachine, Protocol):
    """What the loop needs of the core (`core/coordinator/state.py`)."""

    def handle(self, event: CoordinatorEvent, *, now: float) -> list[CoordinatorAction]: ...

    def wake_at(self) -> float | None: ...

    def seed_alive(self) -> bool: ...

    def status(self, *, now: float) -> Status: ...

    def earned(self, workers: Iterable[PeerId]) -> EarnedStatus: ...

    def step_summary(self, step: int) -> StepSummary | None: ...


class CoordinatorProcess:
    """One running coordinator, and the backend of its HTTP API."""

    def __init__(
        self,
        run: RunDirectory,
        machine: Machine,
        *,
        access: AccessTable,
        ledger: LedgerThread,
        data_plane: DataPlane,
        files: VersionFiles,
        history: RunHistory,
        tls: Tls | None = None,
        peer_networks: Sequence[IpNetwork] = (),
        service: Notifier | None = None,
        make_gateway: Callable[[Emit], Gateway] | None = None,
        audit_log: JsonLog | None = None,
        sample_log: SampleLog | None = None,
        viewers_see_samples: bool = False,
        last_version: VersionPublished | None = None,
        facts: RunFacts | None = None,
    ) -> None:
        self._facts = facts or RunFacts()
        self.run_id = run.run_id
        self._run = run
        self._machine = machine
        self._access = access
        # Whom the core refuses because the access table says so.
        self._convicted = set(access.convicted())
        self._enrolments = Enrolments(access)
        self._ledger = ledger
        self._data_plane = data_plane
        self._files = files
        self._tls = tls
        self._service = service or Notifier()
        self._mailbox: Mailbox[CoordinatorEvent] = Mailbox()
        self._requests = PendingRequests(self._mailbox.put)
        self.gateway = None if make_gateway is None else make_gateway(self._mailbox.put)
        self.sessions = Sessions(
            run.key,
            successions=run.keys.successions,
            known_peer=self._known_peer,
            emit=self._mailbox.put,
            peer_networks=peer_networks,
        )
        self._audit_log = audit_log
        self._sample_log = sample_log
        self._history = history
        self._page = LivePage(machine, self.look)
        self.viewers_see_samples = viewers_see_samples
        self._audited: asyncio.Queue[AuditTold] = asyncio.Queue(AUDITED_MAX)
        self._group_log = GroupLog(self.sessions.peer)
        self._metrics = CoordinatorMetrics(ledger=run.path / LEDGER_FILE)
        self._tasks = asyncio.TaskGroup()
        self._serving = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_reason: str | None = None
        self._core_stops = False
        # None between two turns.
        self._turn_began_at: float | None = None
        self._publishing = asyncio.Lock()
        self._wheel = GivenWheel()
        self._learner_heard_at: float | None = None
        # Calls of the learner that are being answered: while it waits for a batch, it is there.
        self._learner_calls = 0
        # None where no boxes are rented.
        self.renting: Callable[[], RentingStatus] | None = None
        # The status that owners of boxes read. They may be many and ask often, so making it takes a
        # small share of the loop, however cheap it is.
        self._seen = CostlyAnswer(self.look, cheap_s=0.0)
        self._published_paths: set[str] = set()
        self._last_version = last_version

    # --- the loop ------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Stop serving in order. A signal handler may call this."""
        log.info("stopping reason=%s", reason)
        self._service.stopping(f"stopping ({reason})")
        self._stop.set()
        self._mailbox.wake()

    async def serve(self, *helpers: Coroutine[Any, Any, None]) -> None:
        """Run until `stop`, with these helpers as tasks.

        Fault: the core stopped the run, or the ledger failed.
        """
        try:
            async with self._tasks:
                self._serving.set()
                for helper in self._helpers(*helpers):
                    self._tasks.create_task(helper)
        except* _StoppedError:
            pass
        except* Fault as faults:
            self._stop_reason = str(first_fault(faults))
        finally:
            self._mailbox.close()
            self._requests.close()
            if self.gateway is not None:
                self.gateway.close()
            self.sessions.close_all()
        if self._last_version is not None:
            await self._sync_at_end(self._last_version)
        if self._stop_reason is not None:
            log.error("stopped reason=%s", self._stop_reason)
            # A service manager need not start it again: what the core stops for stays as it is.
            raise (OperatorFault if self._core_stops else Fault)(self._stop_reason)

    def _helpers(self, *others: Coroutine[Any, Any, None]) -> tuple[Coroutine[Any, Any, None], ...]:
        watches = (
            self._sync_last(),
            self._watch_access(),
            self._metrics.watch(self._run.path),
            self._ledger.keep_small(),
            self._history.keep(),
        )
        records = () if self.gateway is None else (self.gateway.keep_records(),)
        audited = () if self._audit_log is None else (self._keep_audited(self._audit_log),)
        samples = () if self._sample_log is None else (self._sample_log.keep(),)
        return (self._turns(), *watches, *records, *audited, *samples, *others)

    async def _sync_last(self) -> None:
        """Make the last version survive a power failure, once no other has followed for a while."""
        while True:
            last = self._last_version
            await asyncio.sleep(SYNC_LAST_S)
            if last is not None and last is self._last_version:
                await self._sync(last.path, last.digest)

    async def _sync_at_end(self, last: VersionPublished) -> None:
        if await asyncio.to_thread(self._files.is_synced, last.path):
            return
        log.info(
            "syncing version=%d bytes=%d: the last version is read and written to the disk, so that "
            "it survives a power failure; this takes at most %g s, and a second signal ends it",
            last.version,
            last.full_bytes,
            SYNC_AT_END_S_MAX,
        )
        try:
            async with asyncio.timeout(SYNC_AT_END_S_MAX):
                await asyncio.to_thread(self._files.sync, last.path, last.digest)
        except TimeoutError:
            log.warning(
                "version %d is not synced in %g s; if the machine goes down, the next start hashes it",
                last.version,
                SYNC_AT_END_S_MAX,
            )

    async def _sync(self, path: str, digest: Digest) -> None:
        if not await asyncio.to_thread(self._files.sync, path, digest):
            await self._mailbox.put(CopyLost(path))

    async def _turns(self) -> None:
        while not self._stop.is_set():
            await self._turn()
            self._service.turned(self._words)
        for _ in range(0 if self._stop_reason else LAST_TURNS_MAX):
            await self._take_turn(self._mailbox.waiting())
        # A task group ends its other tasks only by an exception.
        raise _StoppedError

    async def _turn(self) -> None:
        wake_at = self._machine.wake_at()
        timeout_s = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        events = await self._mailbox.take(timeout_s=self._service.wait_s(timeout_s))
        if wake_at is not None and time.monotonic() >= wake_at:
            for _ in range(LATE_ROUNDS if time.monotonic() > wake_at + LOOP_LATE_S else 0):
                await asyncio.sleep(0)
                events += self._mailbox.waiting(EVENTS_MAX)
            events.append(DeadlinePassed())
        await self._take_turn(events)

    async def _take_turn(self, events: list[CoordinatorEvent]) -> None:
        self._turn_began_at = time.monotonic()
        # Records become durable before any action of this turn is visible outside (I4).
        actions = [action for event in events for action in self._handle(event)]
        await self._persist([action.record for action in actions if isinstance(action, Persist)])
        for action in actions:
            self._perform(action)
        # All samples of a turn go to the task's processes together.
        scoring = [action for action in actions if isinstance(action, ScoreSample)]
        for share in self._data_plane.shares(scoring):
            self._tasks.create_task(self._score(share))
        self._turn_began_at = None

    def _words(self) -> str:
        """One line for `systemctl status`."""
        status = self._machine.status(now=time.monotonic())
        newest = status.newest_version
        version = "no version" if newest is None else f"version {newest.version}"
        return (
            f"{version} published, step {status.committed_step} committed, "
            f"{len(status.workers)} workers, {status.groups.leases} leases"
        )

    def _handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        self._metrics.count(event)
        return self._machine.handle(event, now=time.monotonic())

    async def _persist(self, records: list[CoordinatorRecord]) -> None:
        if records:
            with self._metrics.persist_s.time():
                await self._ledger.append(records)
            for record in records:
                if self.gateway is not None:
                    self.gateway.durable(record)
                if self._sample_log is not None:
                    self._sample_log.tell(record)
            for record in records:
                if isinstance(record, VersionPublished):
                    self._published_paths.add(record.path)
                    self._last_version = record
                if isinstance(record, BatchCommitted):
                    summary = self._machine.step_summary(record.step)
                    if summary is not None:
                        self._history.tell(summary)

    def _perform(self, action: CoordinatorAction) -> None:  # noqa: C901 - one line per action
        self._group_log.tell(action)
        match action:
            case Persist() | Note() | ScoreSample():
                pass
            case Send(session, message):
                self.sessions.send(message, session)
            case SendRoot(to, root):
                self.sessions.send(SignedRoot(root, sign_root(self._run.key, root)), *to)
            case CloseSession(session):
                self.sessions.close(session)
            case DialBack():
                self._tasks.create_task(self._dial_back(action))
            case Reply():
                self._requests.answer(action)
            case DrawPrompt():
                self._tasks.create_task(self._draw(action))
            case ProbeRewards():
                self._tasks.create_task(self._tell(self._data_plane.probe(action)))
            case StepEnvironment():
                self._tasks.create_task(self._tell(self._data_plane.step(action)))
            case ForgetEpisode():
                self._data_plane.forget(action)
            case DeleteVersion(path):
                self._published_paths.discard(path)
                self._tasks.create_task(asyncio.to_thread(self._files.delete, path))
            case SyncVersion(path, digest):
                self._tasks.create_task(self._sync(path, digest))
            case StopRun(reason):
                self._stop_reason, self._core_stops = reason, True
                self._stop.set()
            case ChoiceGrew() | CallRefused():
                if self.gateway is not None:
                    self.gateway.take(action)
            case AuditTold():
                with suppress(asyncio.QueueFull):
                    self._audited.put_nowait(action)
            case Convict(worker, reason):
                self._tasks.create_task(self._convict(worker, reason))
            case _:
                assert_never(action)

    async def _dial_back(self, action: DialBack) -> None:
        await self._mailbox.put(
            DialBackEnded(action.session, await dial_back(action, self.run_id, self._tls))
        )

    async def _draw(self, action: DrawPrompt) -> None:
        event = await self._data_plane.draw(action)
        if isinstance(event, PromptDrawn) and event.contents:
            # They are durable before a record names them.
            await self._ledger.attach(event.contents)
            event = replace(event, contents=())
        await self._mailbox.put(event)

    async def _tell(self, work: Awaitable[CoordinatorEvent]) -> None:
        await self._mailbox.put(await work)

    async def _score(self, actions: Sequence[ScoreSample]) -> None:
        async for event in self._data_plane.score(actions):
            await self._mailbox.put(event)

    async def _convict(self, worker: PeerId, reason: str) -> None:
        log.warning("convicted peer=%s reason=%s", worker, reason)
        try:
            await asyncio.to_thread(self._access.convict, worker, reason, now_s=time.time())
            self._convicted.add(worker)
        except StoreFault as fault:
            # The core refuses it as long as this process lives.
            log.warning("the conviction of %s is not durable: %s", worker, fault)

    async def _keep_audited(self, audit_log: JsonLog) -> None:
        """Write what audits found, as many records at a time as are there."""
        while True:
            told = [await self._audited.get()]
            while not self._audited.empty():
                told.append(self._audited.get_nowait())
            now_s = time.time()
            try:
                await asyncio.to_thread(audit_log.append, [audit_record(e, now_s) for e in told])
            except StoreFault as fault:
                log.warning("%d records of audits are lost: %s", len(told), fault)

    async def _watch_access(self) -> None:
        # The core hears once of each peer whose token was revoked or deleted, and of each that a
        # person has pardoned.
        told: frozenset[PeerId] = frozenset()
        news = await asyncio.to_thread(OperatorNews, self._run.path)
        while True:
            await asyncio.sleep(ACCESS_RELOAD_S)
            for each in await asyncio.to_thread(news.take):
                log.info(
                    "ordered %s %s by=%s", *(each.get(key) for key in ("order", "token", "by"))
                )
            try:
                await asyncio.to_thread(self._access.reload)
            except StoreFault as fault:
                log.warning("cannot reread the access table, keeping the last one: %s", fault)
            revoked = frozenset(filter(self._lost_access, self.sessions.peers()))
            for peer in revoked - told:
                await self._mailbox.put(PeerRevoked(peer))
            told = revoked
            pardoned = self._convicted - self._access.convicted().keys()
            self._convicted -= pardoned
            for peer in pardoned:
                await self._mailbox.put(PeerPardoned(peer))

    def _lost_access(self, peer: PeerId) -> bool:
        try:
            self._known_peer(peer)
        except Denied:
            return True
        return False

    def _known_peer(self, peer: PeerId) -> KnownPeer:
        return self._access.peer(peer, now_s=time.time())

    # --- the API's backend ---------------------------------------------------

    def unhealthy(self) -> str:
        began_at, now = self._turn_began_at, time.monotonic()
        if began_at is None or now - began_at < _STUCK_S:
            return ""
        return f"the loop has waited {now - began_at:.0f} s for the disk of its ledger"

    def unready(self) -> str:
        if self._stop.is_set():
            return "stopping"
        if not self._serving.is_set():
            return "starting"
        return self.unhealthy() or ("" if self._machine.seed_alive() else "the seed is away")

    def caller(self, secret: str) -> Caller:
        return self._access.caller(secret, now_s=time.time())

    async def recognise(self, secret: str) -> None:
        await self._enrolments.recognise(secret)

    async def enrol(self, secret: str, public_key: bytes, proof: bytes) -> tuple[PeerId, str]:
        peer = await self._enrolments.enrol(Enrolment(secret, public_key, proof))
        return peer, self._run.authority.certify_peer(public_key)

    async def ask(
        self, make: Callable[[RequestId], CoordinatorEvent], *, timeout_s: float
    ) -> Reply | None:
        self._learner_calls += 1
        try:
            return await self._requests.ask(make, timeout_s=timeout_s)
        finally:
            self._learner_calls -= 1
            self._learner_heard_at = time.monotonic()

    async def order_worker(
        self, peer: PeerId, order: WorkerOrder, *, hand_over: bool, timeout_s: float
    ) -> Reply | None:
        """Cordon, uncordon or drain a worker. A cordon is durable before it takes effect."""
        cordoned = order != "uncordon"
        await asyncio.to_thread(self._access.cordon, peer, cordoned=cordoned, now_s=time.time())
        return await self._requests.ask(
            lambda number: WorkerOrdered(number, peer, order, hand_over), timeout_s=timeout_s
        )

    async def publish(
        self, epoch: Epoch, version: Version, path: str | None, manifest: Manifest | None
    ) -> Reply | None:
        """Adopt and publish a version; None: the coordinator stops. manifest: as in
        `VersionFiles.adopt`.

        A caller that hangs up does not cancel it, so that no half-adopted version stays behind.
        """
        await self._serving.wait()
        if self._stop.is_set():
            return None
        outcome = await asyncio.shield(
            self._tasks.create_task(self._publish(epoch, version, path, manifest))
        )
        if isinstance(outcome, Fault):
            raise outcome
        return outcome

    async def _publish(
        self, epoch: Epoch, version: Version, path: str | None, manifest: Manifest | None
    ) -> Reply | Fault | None:
        async with self._publishing:
            began_at = time.monotonic()
            try:
                adopted = await asyncio.to_thread(self._files.adopt, epoch, version, path, manifest)
            except Fault as fault:
                return fault
            reply = await self._requests.ask(
                lambda number: PublishAsked(
                    number, epoch, version, adopted.digest, adopted.path, adopted.full_bytes
                ),
                timeout_s=None,
            )
            if adopted.path in self._published_paths:
                say(
                    log,
                    logging.INFO,
                    "published",
                    version=version,
                    full_bytes=adopted.full_bytes,
                    seconds=f"{time.monotonic() - began_at:.3f}",
                )
            # The core refused the version, or it was published before from other files.
            else:
                await asyncio.to_thread(self._files.delete, adopted.path)
            return reply

    async def upload(
        self, epoch: Epoch, version: Version, name: str, data: AsyncIterator[bytes]
    ) -> int:
        return await self._files.upload(epoch, version, name, data)

    async def plan_removal(self, peer: PeerId, reason: str) -> None:
        """Tell the core that the renter will remove the box of this peer."""
        await self._mailbox.put(RemovalPlanned(peer, reason))

    def look(self) -> Status:
        """The core's status, completed with facts that only this process knows."""
        now = time.monotonic()
        # A learner whose call is still open is present, however long it waits.
        heard_at = now if self._learner_calls else self._learner_heard_at
        renting = None if self.renting is None else self.renting()
        status = self._machine.status(now=now)
        refused = self._refused_peers(status, now)
        others = tuple(
            OtherBuildStatus(each.peer, each.name, each.build.name, each.build.protocol)
            for each in self.sessions.other_builds.here(now)
        )
        process = ProcessStatus(
            run_id=self.run_id,
            run=self._facts,
            disk=self._disk(),
            expiring_tokens=self._expiring_tokens(time.time(), renting),
            peer_faults=self.sessions.faults.total,
            refused_peers=refused,
            learner_silent_s=None if heard_at is None else now - heard_at,
            renting=renting,
            build=THIS_BUILD.name,
            protocol=THIS_BUILD.protocol,
            other_builds=others[-OTHER_BUILDS_SHOWN_MAX:],
            other_builds_total=len(others),
        )
        alerts = (*status.alerts, *process_alerts(status, process))
        of_the_run_first = tuple(sorted(alerts, key=lambda alert: alert.subject != ""))
        return replace(status, process=process, alerts=of_the_run_first)

    def _disk(self) -> DiskStatus | None:
        free = self._metrics.disk_free
        return None if free is None else DiskStatus(free, self._files.bytes_max)

    def _expiring_tokens(
        self, now_s: float, renting: RentingStatus | None
    ) -> tuple[TokenExpiry, ...]:
        # A rented box has a token of its own, which lives as long as the box.
        rented = set() if renting is None else {box.label for box in renting.boxes}
        return tuple(
            TokenExpiry(token.name, token.role, (token.expires_at or 0.0) - now_s)
            for token in self._access.expiring(now_s=now_s, within_s=EXPIRY_TOLD_S)
            if token.name not in rented
        )

    def _refused_peers(self, status: Status, now: float) -> tuple[RefusedPeerStatus, ...]:
        names = {peer.id: peer.name for peer in (*status.workers, *status.relays)}
        refused = self.sessions.faults.refused(now)
        tokens = {each.peer: self._access.token_of(each.peer) or "" for each in refused}
        enrolled = {token: len(self._access.peers_of(token)) for token in {*tokens.values()}}
        return tuple(
            RefusedPeerStatus(
                id=each.peer,
                name=names.get(each.peer, ""),
                refused_s=each.refused_s,
                token=tokens[each.peer],
                token_peers=enrolled[tokens[each.peer]],
            )
            for each in refused
        )

    def samples(self, step: int | None) -> dict[str, Any]:
        return (ShownSamples() if self._sample_log is None else self._sample_log.shown).of(step)

    def history(self, since: int) -> bytes:
        return self._history.of(since)

    def live_page(self, *, role: Role, seen: int, plan: str, stripe: int) -> bytes:
        return self._page.answer(role, seen=seen, plan=plan, stripe=stripe)

    def status(self) -> dict[str, Any]:
        return status_json(self.look())

    def own_status(self, token: str) -> dict[str, Any]:
        mine, convicted = self._access.peers_of(token), self._access.convicted().keys()
        found: dict[str, Any] = plain(
            own_status(self._seen.get(), mine, convicted, self._machine.earned(mine))
        )
        return found

    def metrics(self) -> bytes:
        self._metrics.events_waiting.set(len(self._mailbox))
        self._metrics.tokens_expire(self._access.expiries(now_s=time.time()))
        return self._metrics.render(self.look())

    async def attachment(self, digest: Digest) -> bytes | None:
        await self._serving.wait()
        return await self._ledger.attachment(digest)

    async def wheel(self) -> tuple[str, bytes]:
        return await self._wheel.get()
