"""The process shell that the seed and the workers share: mailbox, links, and the turns of a machine.

    control link, peer links, engines, disk --> mailbox --> machine.handle --> actions

A turn is one event and its actions. The owner performs the actions of a turn without awaiting; long
work becomes a task that ends in an event.

Putting an event never waits, because links and engines put events from callbacks and tasks that must
not block each other. The receiver ends a link that sends more than can be handled.
"""

import asyncio
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from echo2d.core.base.ids import FormId, Version
from echo2d.core.protocol.control_messages import Address, SegmentsWanted, TransferReport
from echo2d.core.relay.busy_meter import BusyMeter
from echo2d.core.relay.events import RelayDeadlinePassed, RelayEvent
from echo2d.errors import PeerFault, path_fault
from echo2d.net.control.client import ControlLink, Identity, LinkOwner
from echo2d.runtime.peer.base_model import BaseModel
from echo2d.runtime.peer.receiver import Receiver
from echo2d.store.frames import FrameStore

PeerEvent = TypeVar("PeerEvent")
EventIn = TypeVar("EventIn", contravariant=True)
PeerAction = TypeVar("PeerAction")

log = logging.getLogger("echo2d.runtime")


class PeerMachine(Protocol[EventIn, PeerAction]):
    """The machine that decides: `Relay` at the seed, `WorkerState` at a worker."""

    def wake_at(self) -> float | None: ...

    def handle(self, event: EventIn, *, now: float) -> list[PeerAction]: ...


class ProcessOwner(LinkOwner, Protocol):
    """What the control link and the receiver need of the daemon."""

    def fail(self, form: FormId, reason: str) -> None:
        """See `HoldingsOwner`."""

    def serving_version(self) -> Version | None:
        """See `HoldingsOwner`."""

    def base_of(self, form: FormId) -> BaseModel | None:
        """See `HoldingsOwner`."""


class PeerProcess(Generic[PeerEvent]):
    """One run of a peer's process; `open` makes its `receiver`."""

    def __init__(
        self, url: str, identity: Identity, owner: ProcessOwner, *, rng: random.Random
    ) -> None:
        self.identity, self._owner = identity, owner
        self.boot_id = secrets.token_hex(8)
        self.control = ControlLink(url, identity, owner, rng=rng)
        # Where the process listens for other peers, once it does.
        self.address: Address | None = None
        self.receiver: Receiver
        self._events: deque[PeerEvent | RelayEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of the turn that waits for an event

    def open(
        self,
        store: FrameStore,
        busy: BusyMeter,
        *,
        no_tls: bool,
        receive_only: bool = False,
        uplink_limit: float | None = None,
    ) -> Receiver:
        """Make the receiver. The arguments are as in `Receiver`."""
        self.receiver = Receiver(
            self.identity,
            store,
            self,
            no_tls=no_tls,
            busy=busy,
            receive_only=receive_only,
            uplink_limit=uplink_limit,
        )
        return self.receiver

    async def listen(self, host: str, port: int, *, key: str) -> Address:
        """Accept peer links from now on. key: the config key of the address.

        OperatorFault, which names the key: the address cannot be used.
        """
        try:
            self.address = Address(*await self.receiver.links.listen(host, port))
        except OSError as error:
            raise path_fault(f"{key}: cannot listen on {host}:{port}", error) from error
        return self.address

    # --- what the receiver asks

    @property
    def crowded(self) -> bool:
        # 50 links can send this many messages in a second; usually a handful of events wait.
        return len(self._events) >= 65536

    def emit(self, event: RelayEvent) -> None:
        self.put(event)

    def tell(self, message: SegmentsWanted | TransferReport) -> None:
        self.control.send(message)

    def fail(self, form: FormId, reason: str) -> None:
        self._owner.fail(form, reason)

    def serving_version(self) -> Version | None:
        return self._owner.serving_version()

    def base_of(self, form: FormId) -> BaseModel | None:
        return self._owner.base_of(form)

    # --- events

    def put(self, event: PeerEvent | RelayEvent) -> None:
        """Queue an event for the machine."""
        self._events.append(event)
        if self._waiter is not None:
            _wake(self._waiter)

    async def turn(
        self,
        machine: PeerMachine[PeerEvent | RelayEvent, PeerAction],
        *,
        wait_s: Callable[[float | None], float | None] = lambda wait_s: wait_s,
    ) -> tuple[PeerEvent | RelayEvent, list[PeerAction]]:
        """Wait for the next event or deadline, and let the machine handle it.

        If a peer broke the protocol, its link is closed and there are no actions. wait_s: may shorten
        the wait.
        """
        clock = asyncio.get_running_loop().time
        if not self._events:
            wake_at = machine.wake_at()
            await self._wait(wait_s(None if wake_at is None else wake_at - clock()))
        event = self._events.popleft() if self._events else RelayDeadlinePassed()
        try:
            actions = machine.handle(event, now=clock())
        except PeerFault as fault:
            self.receiver.blame(event, fault)
            return event, []
        self.receiver.noticed(event)
        return event, actions

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait for an event, at most this long (None: without limit)."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        alarm = None if timeout_s is None else loop.call_later(max(0.0, timeout_s), _wake, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if alarm is not None:
                alarm.cancel()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
