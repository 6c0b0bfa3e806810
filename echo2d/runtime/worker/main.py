"""`echo2d join`: the process of one worker or relay peer, around the state machine `WorkerState`.

    control link --+
    peer links ----+--> mailbox --> WorkerState.handle --> actions: send messages and frames,
    engine, disk --+                                                apply, refit, generate

A turn handles one event and performs its actions without awaiting in between. Long work becomes a
task that ends in an event. The process ends on SIGTERM, when it is drained, when the coordinator
refuses it for good, or on a bug of its own. When its owner wants the box back, it starts again and
waits (`owner`).
For a service manager it is started once its listener is open and the loop runs. It waits without
limit for an absent coordinator, and says so in its status line.
"""

import asyncio
import logging
import math
import random
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, Never
from urllib.parse import urlsplit

from echo2d.config.worker import WorkerConfig
from echo2d.core.base.ids import FormId, PublishSeq, Version, version_label
from echo2d.core.cluster.membership import PEER_NAME_CHARS_MAX
from echo2d.core.protocol.control_messages import (
    Address,
    Heartbeat,
    Hello,
    PromptRead,
    ReadPrompt,
    ScoreAnswers,
    ScoringFailed,
    SegmentPage,
    SignedRoot,
    ToCoordinator,
    ToPeer,
    Welcome,
)
from echo2d.core.protocol.peer_handshake import DIAL_BACK, SECRET_BYTES
from echo2d.core.relay.relay import Relay
from echo2d.core.weights.signed_index import Root
from echo2d.core.worker.events import (
    AbortGeneration,
    ApplyForm,
    ArrivalFailed,
    CancelApply,
    ControlDown,
    ControlUp,
    CoordinatorSaid,
    DropForm,
    EngineRefitted,
    HoldEngines,
    IndexRoot,
    KeepPublishSeq,
    LeaveAsked,
    RefitEngines,
    RootVerified,
    SampleProgressed,
    SendControl,
    ShutDown,
    SnapshotReady,
    StartGeneration,
    StartScoring,
    StopAsked,
    WorkerNote,
)
from echo2d.core.worker.progress import Stage
from echo2d.core.worker.state import WorkerAction, WorkerEvent, WorkerState
from echo2d.engines.base import Engine, ScoringEngine
from echo2d.errors import EngineFault, IntegrityFault, OperatorFault, StoreFault
from echo2d.logs import say
from echo2d.net.control.client import Identity, enrol
from echo2d.net.security.auth import Succession, TokenFile, read_token_file, verify_root
from echo2d.net.security.tls import GIVEN_UP
from echo2d.net.security.urls import CoordinatorUrls, is_loopback, unencrypted
from echo2d.process_environment import notifier
from echo2d.runtime.audit.scoring import score_order
from echo2d.runtime.peer.base_model import BaseModel
from echo2d.runtime.peer.peer_process import PeerProcess
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.process.lifecycle import Ending, collect_rarely, outcome, start_again
from echo2d.runtime.worker.engine_refit import EngineRefits, make_engines
from echo2d.runtime.worker.generation import LeaseRunner
from echo2d.runtime.worker.metrics import WorkerMetrics, serve_metrics
from echo2d.runtime.worker.owner import Owner, Withdrawn
from echo2d.runtime.worker.progress import ProgressTeller, Show, Worked
from echo2d.runtime.worker.snapshot_builder import SnapshotBuilder
from echo2d.runtime.worker.stop_strings import ServedTexts
from echo2d.sd_notify import Notifier

# An engine that has not closed within this time is left running.
ENGINES_CLOSE_S = 5.0

log = logging.getLogger("echo2d.worker")


class _Stopped(Exception):  # noqa: N818 - the ordinary end
    """Ends the tasks of a worker that has said goodbye."""


class Worker:
    """One run of the worker. token: enrol with it first; None if the worker is enrolled already."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: Identity,
        state_dir: StateDir,
        engines: Sequence[Engine],
        *,
        rng: random.Random,
        token: TokenFile | None = None,
        service: Notifier | None = None,
        teller: ProgressTeller | None = None,
    ) -> None:
        self._teller = teller or ProgressTeller()
        self._config, self._state_dir, self._engines = config, state_dir, engines
        self._texts = ServedTexts()
        self._rng, self._token, self._service = rng, token, service or Notifier()
        self._dial_back_secret = secrets.token_bytes(SECRET_BYTES)
        self._peer: PeerProcess[WorkerEvent] = PeerProcess(config.url, identity, self, rng=rng)
        self._control = self._peer.control
        self._metrics = WorkerMetrics()
        self._answers, self._tokens = 0, 0
        # comes_back: it leaves because its owner wants the box. _ends: it was told to end for good.
        self.comes_back, self._ends = False, False
        # publish_seq is written by one task at a time, so that an older number never overwrites a newer one.
        self._saving = asyncio.Lock()
        self._base: BaseModel | None = None
        self._disk_free: int | None = None
        self._disconnected = asyncio.Event()
        self._disconnected.set()

    def stop(self, reason: str) -> None:
        """Leave in order: give the leases back and say goodbye to the coordinator."""
        self.comes_back, self._ends = False, True
        self._service.stopping(f"stopping ({reason})")
        self._peer.put(StopAsked(reason))

    def leave(self, reason: str) -> None:
        """Take no more leases, then stop: this machine will be taken away soon."""
        self.comes_back, self._ends = False, True
        self._peer.put(LeaveAsked(reason))

    def withdraw(self, reason: str) -> None:
        """Leave as with `stop`, but come back when the owner of the box lets the worker work again."""
        self.comes_back = not self._ends
        self._peer.put(StopAsked(reason))

    def status(self) -> dict[str, Any]:
        """The numbers behind `GET /metrics`."""
        serving = self._state.serving
        return {
            "connected": not self._disconnected.is_set(),
            "running": self._state.running,
            "links": self._receiver.link_count,
            "slots": self._config.slots if self._engines else 0,
            "serving_version": None if serving is None else serving.version,
            "publish_seq": self._publish_seq,
        }

    def unhealthy(self) -> str:
        # A turn waits for nothing but the next event, so if the loop answers, it works.
        return ""

    def unready(self) -> str:
        if self._disconnected.is_set():
            return "not connected to the coordinator"
        return "no version is served yet" if self._engines and not self._state.serving else ""

    async def run(self, opened: Callable[[], None] = lambda: None) -> None:
        """Run until stopped.

        opened: called once the disk has been checked; before that, nothing needs an orderly end.
        OperatorFault: the coordinator refuses this worker for good, or something here is unusable.
        """
        async with AsyncExitStack() as cleanup:
            cleanup.push_async_callback(self._close_engines)
            if self._engines:
                async with self._teller.doing("starting", f"engines={len(self._engines)}"):
                    for engine in self._engines:
                        await engine.start()
            await self._open()
            opened()
            collect_rarely()
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    self._rollouts = LeaseRunner(
                        self._engines, self._tasks, self._peer.put, self._texts
                    )
                    await self._serve()
            except* _Stopped:
                log.info("stopped")

    async def _close_engines(self) -> None:
        try:
            async with asyncio.timeout(ENGINES_CLOSE_S):
                await asyncio.gather(*(engine.close() for engine in self._engines))
        except TimeoutError:
            log.warning("engines left behind: not closed after %g s", ENGINES_CLOSE_S)

    async def _open(self) -> None:
        """Check the files on disk, and build the state machine that starts from them."""
        self._slots, standing = await asyncio.to_thread(self._state_dir.slots)
        # Slots come first: frames get only the disk space that the slots leave.
        store = await asyncio.to_thread(self._state_dir.frames)
        if self._config.base_model is not None:
            self._base = await asyncio.to_thread(BaseModel.at, self._config.base_model)
        me, run_id = self._peer.identity.peer, self._peer.identity.run_id
        self._publish_seq = await asyncio.to_thread(self._state_dir.publish_seq, run_id)
        on_disk = [facts.form for facts in store.forms()]
        relay = Relay(me, unsearched=on_disk, has_base=self._base is not None)
        self._receiver = self._peer.open(
            store,
            relay.busy,
            no_tls=self._config.no_tls,
            receive_only=self._config.receive_only,
            uplink_limit=self._config.uplink_bytes_per_s_max,
        )
        self._receiver.links.expect(DIAL_BACK, self._dial_back_secret)
        self._builder = SnapshotBuilder(self._slots, store, self._receiver.holdings)
        self._refits = EngineRefits(
            self._engines, self._slots, self._config.base_model, self._texts
        )
        self._state = WorkerState(
            relay,
            run_id,
            slots=self._config.slots * len(self._engines),
            publish_seq=self._publish_seq,
            standing=standing,
        )

    async def _serve(self) -> Never:
        """Serve until `ShutDown`, then say goodbye and raise _Stopped."""
        host, port = self._config.listen_host, self._config.listen_port
        address = await self._peer.listen(host, port, key="listen_port")
        self._spawn(self._receiver.run())
        self._spawn(self._watch_disk())
        self._spawn(self._join())
        self._spawn(self._teller.tell(self))
        if self._config.metrics_port:
            self._spawn(serve_metrics(self._config.metrics_port, self._metrics, self))
            self._spawn(self._metrics.watch(self._config.state_dir))
        me, listen = self._peer.identity, f"{host}:{address.port}"
        log.info("started peer=%s run=%s listen=%s", me.peer, me.run_id, listen)
        await self._turns()
        self._control.leave()
        with suppress(TimeoutError):
            # The last messages have 10 s: handed-over work is a few MB, and 20 Mbit/s is a common uplink.
            async with asyncio.timeout(10.0):
                await self._disconnected.wait()
        raise _Stopped

    async def _watch_disk(self) -> None:
        while True:
            self._disk_free = await asyncio.to_thread(self._state_dir.free_bytes)
            # The disk is measured every 5 s, for heartbeats.
            await asyncio.sleep(5.0)

    async def _join(self) -> None:
        if self._token is not None:
            await enrol(
                self._config.url,
                self._token,
                self._peer.identity,
                rng=self._rng,
                patience_s=math.inf,
            )
        await self._control.run()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    # --- the loop

    async def _turns(self) -> None:
        while True:
            self._service.turned(self.words)
            event, actions = await self._peer.turn(self._state, wait_s=self._service.wait_s)
            self._metrics.handled(event)
            if isinstance(event, SampleProgressed):
                self._answers += event.finish is not None
                self._tokens += len(event.tokens)
            for action in actions:
                if isinstance(action, ShutDown):
                    log.info("stopping reason=%s", action.reason)
                    return
                self._perform(action)

    # --- called by the teller

    @property
    def serves(self) -> bool:
        return self._state.serving is not None

    def worked(self) -> Worked:
        receiver = self._receiver
        return Worked(self._answers, self._tokens, receiver.received_bytes, receiver.sent_bytes)

    def words(self) -> str:
        serving = self._state.serving
        version = "no version served" if serving is None else f"version {serving.version} served"
        where = "waiting for" if self._disconnected.is_set() else "connected to"
        return f"{version}, {self._state.running} samples running, {where} {self._config.url}"

    def stage(self) -> Stage | None:
        found = self._state.under_way
        if found is None:
            return None
        holdings, builder = self._receiver.holdings, self._builder
        done, total = 0, None
        if found.what == "receiving" and found.form is not None:
            done, index = holdings.payload_bytes(found.form), holdings.index(found.form)
            total = None if index is None or index.totals is None else index.totals.wire_bytes
        if found.what == "applying":
            done, total = builder.written, builder.chunks
        return Stage(found.what, found.version, done, total)

    # --- actions

    def _perform(self, action: WorkerAction) -> None:  # noqa: C901 - one line per action
        match action:
            case SendControl(message):
                self._control.send(message)
            case StartGeneration(lease):
                self._rollouts.start(lease)
            case StartScoring(order):
                self._spawn(self._score(order))
            case AbortGeneration(lease, attempt):
                self._rollouts.abort(lease, attempt)
            case HoldEngines(hold):
                self._rollouts.hold(hold=hold)
            case IndexRoot(root):
                self._spawn(self._receiver.holdings.accept_root(root))
            case KeepPublishSeq(publish_seq):
                self._spawn(self._keep_publish_seq(publish_seq))
            case ApplyForm():
                self._spawn(self._apply(action))
            case CancelApply(form):
                self._builder.cancel(form)
            case RefitEngines():
                self._spawn(self._refit(action))
            case DropForm(form):
                self._spawn(self._receiver.forget(form))
            case WorkerNote(text):
                log.info("%s", text)
            case ShutDown():
                raise AssertionError("the loop has ended")
            case _:
                self._receiver.perform(action)

    async def _apply(self, order: ApplyForm) -> None:
        clock = asyncio.get_running_loop().time
        began_at, form = clock(), order.form
        done = await self._builder.apply(form, order.stands)
        if isinstance(done, SnapshotReady):
            say(
                log,
                logging.INFO,
                "verified",
                form=form,
                version=done.version,
                payload_bytes=self._receiver.holdings.payload_bytes(form),
                seconds=f"{clock() - began_at:.3f}",
            )
        self._peer.put(done)

    async def _refit(self, order: RefitEngines) -> None:
        done = await self._refits.refit(order)
        if isinstance(done, EngineRefitted):
            pause_s = f"{done.pause_s:.3f}"
            say(log, logging.INFO, "serving", version=done.version, pause_s=pause_s)
        else:
            say(log, logging.WARNING, "refit failed", done.reason, version=done.version)
        self._peer.put(done)

    async def _score(self, order: ScoreAnswers | ReadPrompt) -> None:
        """Score answers, or read a prompt, with a version that is held, on any engine that can."""
        engine = self._scoring_engine()
        if engine is None:
            self._control.send(_failed(order, "no engine here can score"))
            return
        try:
            if isinstance(order, ReadPrompt):
                label = version_label(order.version, order.digest)
                scores = await engine.read_prompt(order.call, label=label)
                self._control.send(PromptRead(order.order, scores))
            else:
                self._control.send(await score_order(engine, order))
        except EngineFault as fault:
            self._control.send(_failed(order, str(fault)))

    def _scoring_engine(self) -> ScoringEngine | None:
        """An engine that can score. None: there is none, or it would score with quantized weights."""
        if self._config.quantized_as:
            return None
        return next((each for each in self._engines if isinstance(each, ScoringEngine)), None)

    async def _keep_publish_seq(self, publish_seq: PublishSeq) -> None:
        async with self._saving:
            self._publish_seq = max(self._publish_seq, publish_seq)
            try:
                await asyncio.to_thread(
                    self._state_dir.keep_publish_seq, self._peer.identity.run_id, self._publish_seq
                )
            # The write is not repeated, because the next version has another number to keep.
            except StoreFault as fault:
                log.warning("publish_seq not kept: %s", fault)

    # --- called by the receiver

    def fail(self, form: FormId, reason: str) -> None:
        self._peer.put(ArrivalFailed(form, reason))

    def serving_version(self) -> Version | None:
        serving = self._state.serving
        return None if serving is None else serving.version

    def base_of(self, form: FormId) -> BaseModel | None:
        if self._state.stands_mostly(form):
            given = () if self._config.base_model is None else (self._config.base_model,)
            # Make a new object each time, because slots change and a BaseModel remembers digests.
            return BaseModel(*self._slots.directories(), *given)
        return self._base

    # --- called by the control link

    def hello(self) -> Hello:
        announced = self._config.announced
        hello = self._state.hello(
            kind="worker" if self._engines else "relay",
            name=(self._config.name or socket.gethostname())[:PEER_NAME_CHARS_MAX],
            boot_id=self._peer.boot_id,
            listen=self._peer.address if announced is None else Address(*announced),
            forms=self._receiver.holdings.whole_forms(),
        )
        return replace(
            hello,
            receive_only=self._config.receive_only,
            uplink_limit=self._config.uplink_bytes_per_s_max,
            dial_back_secret=self._dial_back_secret,
            usd_per_h=self._config.usd_per_h or None,
            scores=self._scoring_engine() is not None,
            quantization=self._config.quantized_as if self._engines else "",
            received_bytes=self._receiver.received_bytes,
            sent_bytes=self._receiver.sent_bytes,
        )

    def heartbeat(self) -> Heartbeat:
        receiver = self._receiver
        return Heartbeat(
            self._state.running, self._disk_free, receiver.received_bytes, receiver.sent_bytes
        )

    async def connected(self, welcome: Welcome) -> None:
        log.info(
            "connected url=%s epoch=%d publish_seq=%d",
            self._config.url,
            welcome.epoch,
            welcome.publish_seq,
        )
        self._disconnected.clear()
        self._peer.put(ControlUp(welcome))
        self._receiver.holdings.reconnected()

    async def received(self, message: ToPeer) -> None:
        match message:
            case SignedRoot(root, signature):
                self._on_root(root, signature)
            case SegmentPage():
                self._spawn(self._receiver.holdings.accept_page(message))
            case _:
                self._peer.put(CoordinatorSaid(message))

    async def disconnected(self, reason: str) -> None:
        log.info("disconnected reason=%s", reason)
        self._disconnected.set()
        self._peer.put(ControlDown())

    def _on_root(self, root: bytes, signature: bytes) -> None:
        try:
            verify_root(self._peer.identity.run_key, root, signature)
            self._peer.put(RootVerified(Root.decode(root)))
        except IntegrityFault as fault:
            log.warning("root refused: %s", fault)


def _identity(url: str, token: TokenFile, state_dir: StateDir) -> Identity:
    """The worker's key, and the run's key whose signatures it accepts. Blocking."""
    identity = Identity.of(url, token, state_dir.key(), state_dir.authority(token))

    async def follow(authority: Succession) -> None:
        # Get a certificate of the new authority: workers that start after the change trust no other.
        await enrol(url, token, identity, rng=random.Random(), patience_s=math.inf)
        await asyncio.to_thread(state_dir.obey, identity.run_id, authority)

    identity.on_follow = follow
    return identity


async def run_worker(
    config: WorkerConfig,
    show: Show | None = None,
    again: Callable[[], object] = start_again,
) -> int:
    """Run `echo2d join`; returns the exit code. show: shows what it does. again: starts the program again.

    OperatorFault, in one line: the operator's mistake, or the coordinator's final refusal.
    """
    token = await asyncio.to_thread(read_token_file, config.token_file)
    if token.role != "worker":
        raise OperatorFault(
            f"worker.token_file: token {token.name} has the role {token.role}; this needs worker: "
            "echo2d token create NAME --role worker"
        )
    config = replace(config, url=config.url or token.url)
    if not config.url:
        raise OperatorFault(
            f"worker.url: {config.token_file} names no coordinator; expected https://HOST:PORT"
        )
    _check_hosts(config)
    state_dir = await asyncio.to_thread(StateDir, config.state_dir, config.disk_bytes_max)
    service, comes_back = notifier(), False
    try:
        owner = await asyncio.to_thread(Owner, config)
        if await owner.wait(service, show):
            async with owner.watching(service):
                comes_back = await _work(config, token, state_dir, owner, service, show)
    except BaseExceptionGroup as group:
        if group.subgroup(Withdrawn) is None:
            return outcome(group)
        comes_back = True
    finally:
        state_dir.close()
    if comes_back:
        again()
    return 0


async def _work(
    config: WorkerConfig,
    token: TokenFile,
    state_dir: StateDir,
    owner: Owner,
    service: Notifier,
    show: Show | None,
) -> bool:
    """Load the engines and run a worker until it is stopped. Returns whether it must start again."""
    teller = ProgressTeller(show)
    async with teller.doing("loading", f"engine={'none' if config.relay_only else config.engine}"):
        engines = await asyncio.to_thread(make_engines, config)
    identity = await asyncio.to_thread(_identity, config.url, token, state_dir)
    rng = random.Random(secrets.randbits(64))
    worker = Worker(
        config,
        identity,
        state_dir,
        engines,
        rng=rng,
        token=token,
        service=service,
        teller=teller,
    )

    def opened() -> None:
        ending.by_signals(worker.stop, worker.leave)
        owner.withdraw = worker.withdraw

    with Ending() as ending:
        await worker.run(opened)
    return worker.comes_back


def _failed(order: ScoreAnswers | ReadPrompt, reason: str) -> ToCoordinator:
    if isinstance(order, ReadPrompt):
        return PromptRead(order.order, b"", reason)
    return ScoringFailed(order.order, reason)


def _check_hosts(config: WorkerConfig) -> None:
    """OperatorFault: an address is not loopback, has no TLS, and the operator did not allow it."""
    if servers := ",".join(filter(unencrypted, config.engine_urls)):
        lost = "prompts, answers and keys travel unencrypted"
        if not config.trust_network:
            raise OperatorFault(
                f"worker.engine_url: {servers} is not loopback, and http:// means no TLS: {lost}; use an https:// "
                "URL, or pass --trust-network to accept this"
            )
        log.warning("trust_network urls=%s: %s", servers, lost)
    urls = [urlsplit(each) for each in CoordinatorUrls(config.url).all]
    named = [each.hostname or "" for each in urls]
    hosts = [host for host in (*named, config.listen_host) if not is_loopback(host)]
    if not hosts or urls[0].scheme == "https":
        return
    if not config.no_tls:
        raise OperatorFault(
            f"{hosts[0]!r} is not loopback, and a URL that begins with http:// means no TLS: "
            f"{GIVEN_UP}; use an https:// URL, or pass --no-tls to accept this"
        )
    log.warning("no_tls hosts=%s: %s", ",".join(hosts), GIVEN_UP)
