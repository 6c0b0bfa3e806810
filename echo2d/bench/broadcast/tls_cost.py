"""What TLS costs a relay: `python -m echo2d.bench.broadcast.tls_cost`.

It prints CPU seconds per GB received and passed on, with and without TLS in turns.

A sender and a leaf in this process, a relay between them in one of its own, on loopback, on uvloop. The relay does
nothing but forward: no hashing, no disk. Its CPU time counts from the first frame to the last.
"""

import asyncio
import multiprocessing
import os
import resource
from collections import deque
from multiprocessing.connection import Connection
from statistics import median

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import FormId, FrameId, Generation, PeerId, PlanId, RunId, StripeId
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from echo2d.core.protocol.peer_messages import FrameReceived, LinkEvent, StreamId, StreamOpened
from echo2d.net.peer.links import PeerLinks
from echo2d.net.security.auth import peer_id_of, public_bytes
from echo2d.net.security.tls import Authority, Tls

FRAME_BYTES = 256 << 10
FRAMES = 8192  # 2 GiB
ROUNDS = 5
WAITING_MAX = 16  # frames that the relay holds before it pauses its parent
STRIPE = (FormId("0" * 32), PlanId(1), Generation(1), StripeId(0))

RUN_KEY, *KEYS = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(4))
KEY_OF = {peer_id_of(public_bytes(key)): key for key in KEYS}
SENDER, RELAY, LEAF = KEY_OF


class End:
    """One of the three: `source` is whom it takes frames from, `sink` to whom it passes them on."""

    def __init__(
        self, me: PeerId, source: PeerId | None, sink: PeerId | None, *, frames: int, with_tls: bool
    ) -> None:
        self.links = PeerLinks(
            run_id=RunId("link-cost"),
            me=me,
            on_event=self._on_event,
            on_ready=lambda _: self.pump(),
            tls=_tls_of(me) if with_tls else None,
        )
        for other in filter(None, (source, sink)):
            self.links.expect(other, bytes(SECRET_BYTES))
        self._me, self._source, self._sink, self._frames = me, source, sink, frames
        self._stream: StreamId | None = None
        self.waiting: deque[tuple[int, memoryview]] = deque()
        self.received = 0
        self.begun, self.done, self.asked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def take(self) -> None:
        """Open the stripe at the source; streams of the smaller id are odd."""
        assert self._source is not None
        stream = 1 if self._me < self._source else 2
        self.links.tell(self._source, StreamOpened(stream, *STRIPE, 0))

    def _on_event(self, _: PeerId, event: LinkEvent) -> None:
        match event:
            case StreamOpened(stream):
                self._stream = stream
                self.asked.set()
                self.pump()
            case FrameReceived(sequence=sequence, payload=payload):
                assert payload is not None
                self.begun.set()
                self.received += 1
                if self._sink is not None:
                    self.waiting.append((sequence, payload))
                self.pump()

    def pump(self) -> None:
        """Pass on as much as there is room for."""
        while (
            self._sink is not None
            and self._stream is not None
            and self.waiting
            and self.links.can_send(self._sink)
        ):
            sequence, payload = self.waiting.popleft()
            self.links.send_frame(self._sink, self._stream, FrameId(sequence), sequence, payload)
        if self._source is not None:
            (self.links.pause if len(self.waiting) > WAITING_MAX else self.links.resume)(
                self._source
            )
        if self.received == self._frames and not self.waiting:
            self.done.set()


def _tls_of(peer: PeerId) -> Tls:
    authority, key = Authority(RUN_KEY), KEY_OF[peer]
    tls = Tls(authority.certificate)
    tls.present(key, authority.certify_peer(public_bytes(key)))
    return tls


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _relay(parent: Connection, *, frames: int, with_tls: bool) -> None:
    async def main() -> None:
        end = End(RELAY, SENDER, LEAF, frames=frames, with_tls=with_tls)
        parent.send(await end.links.listen("127.0.0.1", 0))
        await end.asked.wait()
        end.take()
        await end.begun.wait()
        before = _cpu_s()
        await end.done.wait()
        parent.send(_cpu_s() - before)
        await asyncio.to_thread(parent.recv)
        await end.links.close("done")

    uvloop.run(main())


async def measure(*, frames: int, with_tls: bool) -> float:
    """CPU seconds of the relay per GB."""
    ours, theirs = multiprocessing.Pipe()
    how = {"frames": frames, "with_tls": with_tls}
    relay = multiprocessing.get_context("spawn").Process(target=_relay, args=(theirs,), kwargs=how)
    relay.start()
    sender = End(SENDER, None, RELAY, frames=frames, with_tls=with_tls)
    leaf = End(LEAF, RELAY, None, frames=frames, with_tls=with_tls)
    payload = memoryview(os.urandom(FRAME_BYTES))
    sender.waiting.extend((sequence, payload) for sequence in range(frames))
    host, port = await asyncio.to_thread(ours.recv)
    await sender.links.dial(RELAY, host, port)
    await leaf.links.dial(RELAY, host, port)
    leaf.take()
    cpu_s: float = await asyncio.to_thread(ours.recv)
    await leaf.done.wait()
    ours.send(None)
    await asyncio.to_thread(relay.join)
    for end in (sender, leaf):
        await end.links.close("done")
    return cpu_s / (frames * FRAME_BYTES / 1e9)


def main() -> None:
    costs: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * ROUNDS):
        with_tls = number % 2 == 1
        costs[with_tls].append(uvloop.run(measure(frames=FRAMES, with_tls=with_tls)))
    for with_tls, found in costs.items():
        spread = f"{min(found):.2f} to {max(found):.2f}, {ROUNDS} rounds"
        print(
            f"{'TLS  ' if with_tls else 'plain'}  relay CPU s/GB  median {median(found):.2f}  ({spread})"
        )


if __name__ == "__main__":
    main()
