"""Recognises accepted results that a worker sends again because it has not received the answer.

Invariant: a repeat is recognised by the fingerprint of the whole message, also after a restart and after its
group has ended; none of the newest ANSWERED_MAX accepted results is forgotten.
Not here: which result is accepted (`groups`).
"""

from collections import OrderedDict
from collections.abc import Iterable

from blake3 import blake3

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.codec import pack
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import SampleFinished
from echo2d.core.work.events import AcceptedResult

# The repeats of this many accepted results are recognised; a worker repeats at most its newest 1024.
ANSWERED_MAX = 1 << 16
# The numbers of an attempt and of a sample have fewer bits than this.
_BITS = 64


class AcceptedResults:
    """See the module docstring. recovered: the results accepted before a restart, the oldest first."""

    def __init__(self, recovered: Iterable[AcceptedResult]) -> None:
        self._fingerprints = OrderedDict(
            ((each.key.lease << _BITS | each.key.attempt) << _BITS | each.sample, each.fingerprint)
            for each in recovered
        )
        keep_newest(self._fingerprints, ANSWERED_MAX)

    def is_repeat(self, peer: Peer, message: SampleFinished) -> bool | None:
        """Whether this result was accepted before.

        False: a different result of its attempt and sample was accepted. None: no result of this
        attempt and sample was accepted.
        """
        before = self._fingerprints.get(_key(message))
        return None if before is None else before == _fingerprint(peer, message)

    def add(self, peer: Peer, message: SampleFinished) -> bytes:
        """Record that the result is accepted, and return its fingerprint."""
        fingerprint = self._fingerprints[_key(message)] = _fingerprint(peer, message)
        keep_newest(self._fingerprints, ANSWERED_MAX)
        return fingerprint

    def check(self) -> None:
        assert len(self._fingerprints) <= ANSWERED_MAX


def _key(message: SampleFinished) -> int:
    """The key of a result. It is one number, because a tuple with a record in it takes three times the memory."""
    return (message.lease << _BITS | message.attempt) << _BITS | message.sample


def _fingerprint(peer: Peer, message: SampleFinished) -> bytes:
    return blake3(peer.peer.encode() + pack(message)).digest(16)
