"""The common part of all rivals' programs: the node of a program, and the orders that `baselines` gives it.

A program gets a `RivalNode` as JSON in its last argument and dials the socket that it names. Over the socket it
receives lines of JSON: `prepare` a version, then `go`. Standard library only, because one rival runs in a Python of its
own.
"""

import hashlib
import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

DIGEST_S_MAX = 4.0  # a program that has reported its end may still be writing for this long


@dataclass(frozen=True, slots=True)
class RivalNode:
    """The node at which a program runs.

    number: 0 is the seed. addresses: of all nodes, the seed's first. uplinks: bytes/s of all nodes, 0 for a node that
    no other node can dial. port: the first of the rival's PORTS. directory: for all files of the rival. control: the
    UNIX socket of `baselines`. settings: the name of the rival's settings.
    """

    number: int
    addresses: tuple[str, ...]
    uplinks: tuple[float, ...]
    port: int
    directory: str
    control: str
    settings: str

    @staticmethod
    def of_arguments() -> "RivalNode":
        facts = json.loads(sys.argv[-1])
        for name in ("addresses", "uplinks"):
            facts[name] = tuple(facts[name])
        return RivalNode(**facts)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def address(self) -> str:
        return self.addresses[self.number]

    @property
    def is_seed(self) -> bool:
        return self.number == 0

    @property
    def folder(self) -> Path:
        """This node's own files."""
        return Path(self.directory, self.address)

    def file(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def torrent(self, version: int) -> Path:
        """The torrent, which every node can read. It costs no transfer, in favour of the rival."""
        return Path(self.directory, f"v{version}.torrent")


@dataclass(frozen=True, slots=True)
class RivalOffer:
    """One version. warm: the programs have spread another version before."""

    version: int
    size: int
    sha256: str
    warm: bool


class RivalPeer(Protocol):
    """The part of a program that each rival implements."""

    def prepare(self, offer: RivalOffer) -> None:
        """Do everything that may happen before the clock starts. The seed has the file and is prepared first."""

    def fetch(self, offer: RivalOffer) -> None:
        """Fetch the version; not called at the seed. It returns when all bytes have arrived and are verified."""


def obey(node: RivalNode, peer: RivalPeer) -> None:
    """Follow the orders of `baselines` until it closes the socket."""
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(node.control)

        def say(**facts: object) -> None:
            control.sendall(json.dumps(facts).encode() + b"\n")

        say(node=node.number)
        for line in control.makefile("rb"):
            order = json.loads(line)
            offer = RivalOffer(**order["offer"])
            if order["do"] == "prepare":
                node.file(offer.version - 1).unlink(missing_ok=True)
                peer.prepare(offer)
                say(ready=offer.version)
            elif not node.is_seed:
                peer.fetch(offer)
                done_at = time.monotonic()
                say(done=offer.version, at=done_at, sha256=written_digest(node, offer))


def written_digest(node: RivalNode, offer: RivalOffer) -> str:
    """Wait until the file has the offered digest, at most DIGEST_S_MAX. Returns the digest that it has then."""
    deadline = time.monotonic() + DIGEST_S_MAX
    while True:
        digest = hashlib.sha256(node.file(offer.version).read_bytes()).hexdigest()
        if digest == offer.sha256 or time.monotonic() > deadline:
            return digest
        time.sleep(0.05)
