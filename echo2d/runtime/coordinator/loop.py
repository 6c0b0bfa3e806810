"""The coordinator's process around the core: it turns the world into events, and performs actions.

    control links, HTTP calls, tasks, clock --> mailbox --> core.handle, up to 256 events a turn
    a turn: 1. all Persists in one transaction, on the ledger's thread
            2. then the other actions in order, none of which waits

An action that takes time (a prompt, a reward, deleting a version) becomes a task that ends in an
event. If a Persist fails, the process ends before anything is acknowledged. On `stop` the process
handles, commits and answers the events that have arrived, and tells all other callers to come back
later. Not here: any decision about the run.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import count
from typing import Any, Protocol, assert_never

from echo2d.core.audit.events import AuditTold, Convict
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import Digest, Epoch, PeerId, RequestId, Version
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import (
    CloseSession,
    DeleteVersion,
    DialBack,
    DialBackEnded,
    Note,
    Persist,
    RemovalPlanned,
    Reply,
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
    WorkerOrder,
    WorkerOrdered,
)
from echo2d.core.coordinator.own_status import own_status
from echo2d.core.protocol.addresses import IpNetwork
from echo2d.core.protocol.control_messages import SignedRoot
from echo2d.core.status.json_form import plain, status_json
from echo2d.core.status.schema import (
    EarnedStatus,
    RunFacts,
    Status,
)
from echo2d.core.tinker.events import DrawSample, GiveOperation, OperationLost, StopSample
from echo2d.core.weights.manifest import Manifest
from echo2d.core.work.calls.events import CallRefused, ChoiceGrew
from echo2d.core.work.events import (
    DrawPrompt,
    ForgetEpisode,
    ProbeRewards,
    PromptDrawn,
    ScoreSample,
    StepEnvironment,
)
from echo2d.errors import Fault, OperatorFault, first_fault
from echo2d.net.control.server import Sessions
from echo2d.net.http.costly_answer import CostlyAnswer
from echo2d.net.peer.dial_back import dial_back
from echo2d.net.security.auth import Caller, Role, sign_root
from echo2d.net.security.tls import Tls
from echo2d.runtime.box.wheel import GivenWheel
from echo2d.runtime.coordinator.access_watch import AccessWatch
from echo2d.runtime.coordinator.data_plane import DataPlane
from echo2d.runtime.coordinator.gateway import Gateway
from echo2d.runtime.coordinator.group_log import GroupLog
from echo2d.runtime.coordinator.journals import Journals
from echo2d.runtime.coordinator.live_page import LivePage, PageMachine
from echo2d.runtime.coordinator.metrics import CoordinatorMetrics
from echo2d.runtime.coordinator.process_view import ProcessView
from echo2d.runtime.coordinator.tinker_samples import SampleDrawer
from echo2d.runtime.coordinator.version_publisher import VersionPublisher
from echo2d.runtime.process.mailbox import EVENTS_MAX, EVENTS_PER_TURN_MAX, Mailbox, PendingRequests
from echo2d.runtime.run_dir.access_table import AccessTable, Enrolment
from echo2d.runtime.run_dir.enrolments import Enrolments
from echo2d.runtime.run_dir.ledger_thread import LedgerThread
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE, RunDirectory
from echo2d.runtime.run_dir.version_files import VersionFiles
from echo2d.sd_notify import Notifier

# If the loop sees a deadline this late, the whole process stood still. Heartbeats then wait unread
# in its sockets, and the loop reads them before the core suspects a worker.
LOOP_LATE_S = 1.0
# A turn waits for the ledger's disk. A turn that takes longer than this is stuck, and so is the run.
_STUCK_S = 30.0
# Calls of clients of the Tinker API: each waits for one of thousands of results.
CLIENT_REQUESTS_MAX = 8192

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What the operator chose for the process around the core."""

    # None: no connection has TLS.
    tls: Tls | None = None
    # Peers may announce addresses in these networks, besides the address from which they connect.
    peer_networks: Sequence[IpNetwork] = ()
    # The service manager that started this process.
    service: Notifier = field(default_factory=Notifier)
    # None: the gateway is off.
    make_gateway: Callable[[Emit], Gateway] | None = None
    # With [tinker]: the text of token ids, in which stop texts are found.
    decode: Callable[[Sequence[int]], str] | None = None
    # Whether holders of a viewer's token see prompts and answers.
    viewers_see_samples: bool = False
    # The facts about the run that the status shows.
    facts: RunFacts = field(default_factory=RunFacts)


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
        journals: Journals,
        settings: ProcessSettings,
    ) -> None:
        self._run, self.run_id, self._machine = run, run.run_id, machine
        # The parts to which the loop hands work.
        self._ledger, self._data_plane, self._journals = ledger, data_plane, journals
        self._files = files
        self._tls, self._service = settings.tls, settings.service
        self._mailbox: Mailbox[CoordinatorEvent] = Mailbox()
        numbers = count()
        self._requests = PendingRequests(self._mailbox.put, numbers)
        self._client_requests = PendingRequests(self._mailbox.put, numbers, CLIENT_REQUESTS_MAX)
        self._versions = VersionPublisher(
            files, self._requests.ask, self._mailbox.put, journals.newest
        )
        make = settings.make_gateway
        self.gateway = None if make is None else make(self._mailbox.put)
        self._drawer: SampleDrawer | None = None
        if settings.decode is not None and self.gateway is not None:
            self._drawer = SampleDrawer(self.gateway, settings.decode, self._mailbox.put)
        self._access = access
        self._enrolments = Enrolments(access)
        self._access_watch = AccessWatch(access, run.path, self._mailbox.put)
        self.sessions = Sessions(
            run.key,
            successions=run.keys.successions,
            known_peer=self._access_watch.known_peer,
            emit=self._mailbox.put,
            peer_networks=settings.peer_networks,
        )
        self._group_log = GroupLog(self.sessions.peer)
        # The parts that show the run to people.
        self._metrics = CoordinatorMetrics(ledger=run.path / LEDGER_FILE)
        self.view = ProcessView(
            machine.status, run.run_id, settings.facts, access, self.sessions, files, self._metrics
        )
        self.look = self.view.look
        self._page = LivePage(machine, self.look)
        self.viewers_see_samples = settings.viewers_see_samples
        # The status that owners of boxes read. There may be many owners who ask often, so making it gets a
        # small share of the loop's time, even if it is cheap.
        self._seen = CostlyAnswer(self.look, cheap_s=0.0)
        self._wheel = GivenWheel()
        # The loop's tasks, and how it stops.
        self._tasks = asyncio.TaskGroup()
        self._serving, self._stop = asyncio.Event(), asyncio.Event()
        self._stop_reason: str | None = None
        # Whether it was the core, not the operator, that stopped the run.
        self._core_stops = False
        # When the present turn began. None: the loop is between two turns.
        self._turn_began_at: float | None = None

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
            self._client_requests.close()
            if self.gateway is not None:
                self.gateway.close()
            self.sessions.close_all()
        await self._versions.sync_at_end()
        if self._stop_reason is not None:
            log.error("stopped reason=%s", self._stop_reason)
            # If the core stopped the run, a service manager need not restart it: the core would stop it again.
            raise (OperatorFault if self._core_stops else Fault)(self._stop_reason)

    def _helpers(self, *others: Coroutine[Any, Any, None]) -> tuple[Coroutine[Any, Any, None], ...]:
        watches = (
            self._versions.keep_synced(),
            self._access_watch.watch(self.sessions.peers),
            self._metrics.watch(self._run.path),
            self._ledger.keep_small(),
        )
        records = () if self.gateway is None else (self.gateway.keep_records(),)
        return (self._turns(), *watches, *records, *self._journals.helpers(), *others)

    async def _turns(self) -> None:
        while not self._stop.is_set():
            await self._turn()
            self._service.turned(self._words)
        # After a stop there are enough turns for a full mailbox, and no more, because events may
        # keep coming.
        for _ in range(0 if self._stop_reason else EVENTS_MAX // EVENTS_PER_TURN_MAX):
            await self._take_turn(self._mailbox.waiting())
        # A task group ends its other tasks only if one task raises an exception.
        raise _StoppedError

    async def _turn(self) -> None:
        wake_at = self._machine.wake_at()
        timeout_s = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        events = await self._mailbox.take(timeout_s=self._service.wait_s(timeout_s))
        if wake_at is not None and time.monotonic() >= wake_at:
            # After a standstill, let the event loop read the waiting heartbeats. One round reads the
            # sockets, one makes events, and the others wait for room in the mailbox.
            for _ in range(4 if time.monotonic() > wake_at + LOOP_LATE_S else 0):
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
                if isinstance(record, VersionPublished):
                    self._versions.published(record)
            self._journals.durable(records, self._machine.step_summary)

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
                self._client_requests.answer(action)
            case DrawPrompt():
                self._tasks.create_task(self._draw(action))
            case ProbeRewards():
                self._tasks.create_task(self._tell(self._data_plane.probe(action)))
            case StepEnvironment():
                self._tasks.create_task(self._tell(self._data_plane.step(action)))
            case ForgetEpisode():
                self._data_plane.forget(action)
            case DeleteVersion(path):
                self._tasks.create_task(self._versions.delete(path))
            case SyncVersion(path, digest):
                self._tasks.create_task(self._versions.sync(path, digest))
            case StopRun(reason):
                self._stop_reason, self._core_stops = reason, True
                self._stop.set()
            case ChoiceGrew() | CallRefused():
                if self.gateway is not None:
                    self.gateway.take(action)
            case DrawSample():
                if self._drawer is not None:
                    self._drawer.draw(action, self._tasks)
            case StopSample(future):
                if self._drawer is not None:
                    self._drawer.stop(future)
            case GiveOperation():
                self._tasks.create_task(self._give_operation(action))
            case AuditTold():
                self._journals.audited(action)
            case Convict(worker, reason):
                self._tasks.create_task(self._access_watch.convict(worker, reason))
            case _:
                assert_never(action)

    async def _dial_back(self, action: DialBack) -> None:
        await self._mailbox.put(
            DialBackEnded(action.session, await dial_back(action, self.run_id, self._tls))
        )

    async def _draw(self, action: DrawPrompt) -> None:
        event = await self._data_plane.draw(action)
        if isinstance(event, PromptDrawn) and event.contents:
            # Attachments are durable before a record names them.
            await self._ledger.attach(event.contents)
            event = replace(event, contents=())
        await self._mailbox.put(event)

    async def _give_operation(self, action: GiveOperation) -> None:
        body = await self._ledger.operation_body(action.model, action.number)
        if body is None:
            self._requests.answer(Reply(action.request, HTTPStatus.NO_CONTENT, {}))
            await self._mailbox.put(OperationLost(action.model, action.number))
            return
        order = pack({**action.order, "body": body})
        self._requests.answer(Reply(action.request, HTTPStatus.OK, order))

    async def _tell(self, work: Awaitable[CoordinatorEvent]) -> None:
        await self._mailbox.put(await work)

    async def _score(self, actions: Sequence[ScoreSample]) -> None:
        async for event in self._data_plane.score(actions):
            await self._mailbox.put(event)

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
        with self.view.learner_calls():
            return await self._requests.ask(make, timeout_s=timeout_s)

    async def ask_for_client(
        self, make: Callable[[RequestId], CoordinatorEvent], *, timeout_s: float
    ) -> Reply | None:
        return await self._client_requests.ask(make, timeout_s=timeout_s)

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
            self._tasks.create_task(self._versions.publish(epoch, version, path, manifest))
        )
        if isinstance(outcome, Fault):
            raise outcome
        return outcome

    async def upload(
        self, epoch: Epoch, version: Version, name: str, data: AsyncIterator[bytes]
    ) -> int:
        return await self._files.upload(epoch, version, name, data)

    async def plan_removal(self, peer: PeerId, reason: str) -> None:
        """Tell the core that the renter will remove the box of this peer."""
        await self._mailbox.put(RemovalPlanned(peer, reason))

    def samples(self, step: int | None) -> dict[str, Any]:
        return self._journals.shown_samples(step)

    def history(self, since: int) -> bytes:
        return self._journals.history.of(since)

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
