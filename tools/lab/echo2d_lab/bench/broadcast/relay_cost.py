"""Measures what a relay's links cost: `python -m echo2d_lab.bench.broadcast.relay_cost [--frame-kib 64]`.

It prints CPU seconds per GB received and passed on, for three relays that take turns:

    threads   two blocking threads, plain TCP: one receives into a pool of buffers and hashes, one sends
    plain     our links without TLS
    sealed    our links, sealed with TLS's keys

A sender and a leaf are in this process, and the relay between them is in a process of its own, on loopback, with links
on uvloop. Our relay only forwards: no hashing, no disk. CPU time counts from the first frame to the last.
"""

import argparse
import asyncio
import multiprocessing
import os
import queue
import resource
import socket
import threading
from collections import deque
from multiprocessing.connection import Connection
from statistics import median

import uvloop
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import FormId, FrameId, Generation, PeerId, PlanId, RunId, StripeId
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from echo2d.core.protocol.peer_messages import FrameReceived, LinkEvent, StreamId, StreamOpened
from echo2d.net.peer.links import PeerLinks
from echo2d.net.security.auth import peer_id_of, public_bytes
from echo2d.net.security.tls import Authority, Tls

TOTAL_BYTES = 2 << 30
ROUNDS = 5
POOL_BUFFERS = 8  # buffers of the blocking relay
WAITING_MAX = 16  # frames that the relay holds before it pauses its parent
STRIPE = (FormId("0" * 32), PlanId(1), Generation(1), StripeId(0))

RUN_KEY, *KEYS = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(4))
KEY_OF = {peer_id_of(public_bytes(key)): key for key in KEYS}
SENDER, RELAY, LEAF = KEY_OF


class RelayEnd:
    """One of the three processes. source: the peer from which it takes frames; sink: to which it passes them."""

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
        """Pass on as many frames as the link has room for."""
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
        end = RelayEnd(RELAY, SENDER, LEAF, frames=frames, with_tls=with_tls)
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


async def measure(*, frame_bytes: int, with_tls: bool) -> float:
    """CPU seconds of our relay per GB."""
    ours, theirs = multiprocessing.Pipe()
    frames = TOTAL_BYTES // frame_bytes
    how = {"frames": frames, "with_tls": with_tls}
    relay = multiprocessing.get_context("spawn").Process(target=_relay, args=(theirs,), kwargs=how)
    relay.start()
    sender = RelayEnd(SENDER, None, RELAY, frames=frames, with_tls=with_tls)
    leaf = RelayEnd(LEAF, RELAY, None, frames=frames, with_tls=with_tls)
    payload = memoryview(os.urandom(frame_bytes))
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
    return cpu_s / (TOTAL_BYTES / 1e9)


def _threads_relay(parent: Connection, *, frame_bytes: int, frames: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.send(listener.getsockname())
        (source, _), (sink, _) = listener.accept(), listener.accept()
    empty, full = queue.Queue[bytearray](), queue.Queue[bytearray | None]()
    for _ in range(POOL_BUFFERS):
        empty.put(bytearray(frame_bytes))

    def send() -> None:
        while (buffer := full.get()) is not None:
            sink.sendall(buffer)
            empty.put(buffer)

    sending = threading.Thread(target=send)
    sending.start()
    before = _cpu_s()
    for _ in range(frames):
        buffer = empty.get()
        source.recv_into(buffer, frame_bytes, socket.MSG_WAITALL)
        blake3(buffer).digest()
        full.put(buffer)
    full.put(None)
    sending.join()
    parent.send(_cpu_s() - before)
    source.close()
    sink.close()


def measure_threads(*, frame_bytes: int) -> float:
    """CPU seconds of the blocking relay per GB."""
    ours, theirs = multiprocessing.Pipe()
    frames = TOTAL_BYTES // frame_bytes
    how = {"frames": frames, "frame_bytes": frame_bytes}
    spawn = multiprocessing.get_context("spawn")
    relay = spawn.Process(target=_threads_relay, args=(theirs,), kwargs=how)
    relay.start()
    address, payload, room = ours.recv(), os.urandom(frame_bytes), bytearray(frame_bytes)
    with socket.create_connection(address) as source, socket.create_connection(address) as leaf:

        def receive() -> None:
            while leaf.recv_into(room, frame_bytes):
                pass

        receiving = threading.Thread(target=receive)
        receiving.start()
        for _ in range(frames):
            source.sendall(payload)
        cpu_s: float = ours.recv()
        receiving.join()
    relay.join()
    return cpu_s / (TOTAL_BYTES / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frame-kib", type=int, default=64)
    frame_bytes = parser.parse_args().frame_kib << 10
    costs: dict[str, list[float]] = {"threads": [], "plain": [], "sealed": []}
    for _ in range(ROUNDS):
        costs["threads"].append(measure_threads(frame_bytes=frame_bytes))
        for name, with_tls in (("plain", False), ("sealed", True)):
            found = uvloop.run(measure(frame_bytes=frame_bytes, with_tls=with_tls))
            costs[name].append(found)
    threads = median(costs["threads"])
    for name, found in costs.items():
        spread = f"{min(found):.2f} to {max(found):.2f}, {ROUNDS} rounds"
        ratio = f"{median(found) / threads:.2f} x threads"
        print(f"{name:8} relay CPU s/GB  median {median(found):.2f}  ({spread})  {ratio}")


if __name__ == "__main__":
    main()
