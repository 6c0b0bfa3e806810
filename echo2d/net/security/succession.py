"""A run's authority that was changed on purpose: the old key names the new one.

    old key --signs--> Succession(new key, new certificate, a higher number) --in the Challenge--> member

A member that follows keeps the number and obeys no authority with a lower one again. A key that was lost or
stolen names no successor, since a thief could sign as well: then each member needs a new token file, with a
number of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SUCCESSIONS_MAX = (
    8  # in a Challenge: a member may have been away while the authority changed this often
)


@dataclass(frozen=True, slots=True)
class Succession:
    """run_key: the public key that follows. authority: its certificate, PEM. number: of the changes so far."""

    run_key: bytes
    authority: str
    number: int
    signature: bytes = b""

    @property
    def text(self) -> bytes:
        """What the key before signs."""
        number = self.number.to_bytes(8, "big")
        return b"echo2d succession 1\0" + number + self.run_key + self.authority.encode()


def verifies(public_key: bytes, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def last_of(run_key: bytes, number: int, named: Sequence[Succession]) -> Succession | None:
    """The last of those that lead on from this key, each signed by the key before; None: none does."""
    found = None
    for each in named[:SUCCESSIONS_MAX]:
        if each.number > number and verifies(run_key, each.signature, each.text):
            found, run_key, number = each, each.run_key, each.number
    return found


def signed(old: Ed25519PrivateKey, follows: Succession) -> Succession:
    signature = old.sign(follows.text)
    return Succession(follows.run_key, follows.authority, follows.number, signature)
