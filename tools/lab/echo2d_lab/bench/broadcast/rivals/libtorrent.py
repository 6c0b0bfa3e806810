"""One peer of a BitTorrent swarm, for `baselines`: libtorrent without DHT and uTP, with every peer's address.

It runs in a Python that has libtorrent. In warm rounds the session of earlier versions continues. A connection belongs
to one torrent, so no connection can be kept. Therefore the peers of a warm version connect to each other before the
clock starts, and to the seed when it starts.
"""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo2d_lab.bench.broadcast.rivals.libtorrent_settings import TRIED
from echo2d_lab.bench.broadcast.rivals.node import RivalNode, RivalOffer, obey

POLL_S = 0.01
CONNECT_S = 0.5  # a peer of a warm version waits this long for its connections
BASE = {
    "enable_dht": False, "enable_lsd": False, "enable_upnp": False, "enable_natpmp": False,
    "enable_incoming_utp": False, "enable_outgoing_utp": False,
}  # fmt: skip


class Torrents:
    """One session."""

    def __init__(self, node: RivalNode) -> None:
        self._lt: Any = importlib.import_module("libtorrent")
        self._node, self._settings = node, TRIED[node.settings]
        self._session = self._lt.session(
            {**BASE, **self._settings.changed, "listen_interfaces": f"{node.address}:{node.port}"}
        )
        self._handle: Any = None

    def prepare(self, offer: RivalOffer) -> None:
        if self._handle is not None:
            self._session.remove_torrent(self._handle)
        torrent = self._node.torrent(offer.version)
        flags = self._lt.torrent_flags
        wanted = flags.default_flags & ~flags.auto_managed & ~flags.paused
        if self._node.is_seed:
            self._make_torrent(self._node.file(offer.version), torrent)
            wanted |= flags.super_seeding if self._settings.super_seeding else 0
        self._handle = self._session.add_torrent(
            {
                "ti": self._lt.torrent_info(str(torrent)),
                "save_path": str(self._node.folder),
                "flags": wanted,
            }
        )
        if self._node.is_seed:
            self._wait_until_whole()
        elif offer.warm:
            self._connect(self._node.addresses[1:])
            time.sleep(CONNECT_S)

    def fetch(self, offer: RivalOffer) -> None:
        self._connect(self._node.addresses[:1] if offer.warm else self._node.addresses)
        self._wait_until_whole()

    def _make_torrent(self, file: Path, torrent: Path) -> None:
        storage = self._lt.file_storage()
        self._lt.add_files(storage, str(file))
        flags = self._lt.create_torrent.v1_only if self._settings.v1_only else 0
        made = self._lt.create_torrent(storage, self._settings.piece_kib << 10, flags)
        self._lt.set_piece_hashes(made, str(file.parent))
        torrent.write_bytes(self._lt.bencode(made.generate()))

    def _connect(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            if address != self._node.address:
                self._handle.connect_peer((address, self._node.port))

    def _wait_until_whole(self) -> None:
        while not self._handle.status().is_seeding:
            time.sleep(POLL_S)


if __name__ == "__main__":
    own = RivalNode.of_arguments()
    obey(own, Torrents(own))
