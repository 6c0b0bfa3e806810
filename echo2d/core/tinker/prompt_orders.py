"""Trusted workers read prompts of clients in place of the learner, one prompt at a time each.

    waits --a worker holds its weights, and reads nothing--> ReadPrompt --PromptRead--> scores
      ^                                                          |
      +-- only for the learner <-- it fails, is silent, is gone -+

What a worker says of a prompt is not audited, so only trusted workers are asked, whose engines can score and have no
quantized weights. The number of an order follows from all that decides its answer. So an answer that comes late, even
to the next coordinator, is never taken for that of another order.
Not here: which prompt is next (`samplers`), what a client asks of it (`tinker/wire`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from echo2d.core.base.codec import INT_MAX
from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.control_messages import PromptRead, ReadPrompt
from echo2d.core.tinker.draw_queue import AskedSample
from echo2d.core.tinker.samplers import Samplers
from echo2d.errors import PeerFault

# A prompt that takes longer is read by the learner.
READ_S_MAX = 120.0
# A worker that failed gets no prompt for this long.
READER_REST_S = 5.0


@dataclass(slots=True)
class _Order:
    """What a worker reads. sample: None if the order was given up. until: it is given up then, or forgotten."""

    number: int
    session: SessionId
    sample: AskedSample | None
    until: float


class PromptOrders:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self, samplers: Samplers, members: Membership, versions: PublishedVersions
    ) -> None:
        self._samplers, self._members, self._versions = samplers, members, versions
        self._readers: set[PeerId] = set()
        # A worker without an order is free.
        self._orders: dict[PeerId, _Order] = {}

    def joined(self, peer: Peer) -> None:
        """A peer said hello."""
        self._readers.discard(peer.peer)
        if peer.kind == "worker" and peer.trusted and peer.scores and not peer.quantization:
            self._readers.add(peer.peer)

    def answered(self, peer: Peer, message: PromptRead, *, now: float) -> None:
        """PeerFault: this peer may not read prompts."""
        if peer.peer not in self._readers:
            raise PeerFault("only trusted workers read prompts")
        order = self._orders.get(peer.peer)
        if order is None or order.number != message.order:
            return
        if not message.fault:
            del self._orders[peer.peer]
            self._end(order, message.scores)
        else:
            self._end(order, None)
            order.until = now + READER_REST_S

    def advance(self, *, now: float) -> bool:
        """Give up the orders that take too long, and those of lost workers. Returns whether there were any."""
        given_up = False
        for name, order in list(self._orders.items()):
            peer = self._members.get(name)
            gone = peer is None or peer.session != order.session
            if order.sample is not None and (
                gone or now >= order.until or (peer is not None and not peer.alive)
            ):
                self._end(order, None)
                # The worker is free when it answers, or says hello.
                order.until, given_up = math.inf, True
            if order.sample is None and (gone or now >= order.until):
                del self._orders[name]
        self._samplers.held.reads = self._samplers.has_to_read and any(self._present())
        return given_up

    def give(self, *, now: float) -> Iterator[Send]:
        """The orders for workers that are free."""
        folders = self._samplers.held.open_to(now=now) if self._samplers.has_to_read else {}
        for peer in self._present() if folders else ():
            if peer.session is None or peer.peer in self._orders:
                continue
            keys = {
                folder: key
                for folder, version in folders.items()
                if (key := self._versions.numbered(version)) in peer.engine.held and key is not None
            }
            sample = self._samplers.next_to_read(keys)
            if sample is None:
                continue
            key, call = keys[sample.sampler.folder], sample.order.scored
            number = int.from_bytes(blake3(key.digest + call).digest(8), "big") & INT_MAX
            self._orders[peer.peer] = _Order(number, peer.session, sample, now + READ_S_MAX)
            yield Send(peer.session, ReadPrompt(number, *key, call))

    def wake_at(self) -> float | None:
        times = (each.until for each in self._orders.values() if each.until < math.inf)
        return min(times, default=None)

    def _present(self) -> Iterator[Peer]:
        """The workers that may read prompts, those with an order included."""
        peers = map(self._members.get, sorted(self._readers))
        return (each for each in peers if each and each.alive and not each.service.retiring)

    def _end(self, order: _Order, scores: bytes | None) -> None:
        sample, order.sample = order.sample, None
        if sample is not None:
            self._samplers.read(sample, scores)
