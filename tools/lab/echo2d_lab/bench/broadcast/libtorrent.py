"""One peer of a BitTorrent swarm, for `baselines`: libtorrent without DHT and uTP, given every peer's address.

`libtorrent.py seed|peer OWN_ADDRESS SIGNALS FILE ADDRESSES...`, the seed's address first. A stand-alone script
for a Python that has libtorrent.
"""

import hashlib
import importlib
import sys
import time
from pathlib import Path
from typing import Any

PORT = 6881
PIECE_BYTES = 256 << 10
END_S = 3600.0  # it goes on seeding until it is ended
SETTINGS = {
    "enable_dht": False, "enable_lsd": False, "enable_upnp": False, "enable_natpmp": False,
    "enable_incoming_utp": False, "enable_outgoing_utp": False,
}  # fmt: skip


def make_torrent(lt: Any, file: Path, torrent: Path) -> None:
    storage = lt.file_storage()
    lt.add_files(storage, str(file))
    made = lt.create_torrent(storage, PIECE_BYTES)
    lt.set_piece_hashes(made, str(file.parent))
    part = torrent.with_suffix(".part")
    part.write_bytes(lt.bencode(made.generate()))
    part.rename(torrent)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def main(role: str, address: str, signals_text: str, file_text: str, *addresses: str) -> None:
    lt: Any = importlib.import_module("libtorrent")
    signals, file = Path(signals_text), Path(file_text)
    torrent = signals / "swarm.torrent"
    if role == "seed":
        make_torrent(lt, file, torrent)
    wait_for(torrent)
    session = lt.session({**SETTINGS, "listen_interfaces": f"{address}:{PORT}"})
    handle = session.add_torrent(
        {"ti": lt.torrent_info(str(torrent)), "save_path": str(file.parent)}
    )
    while role == "seed" and not handle.status().is_seeding:
        time.sleep(0.01)
    (signals / f"{address}.ready").touch()
    wait_for(signals / "go")
    for other in addresses:
        if other != address and role != "seed":
            handle.connect_peer((other, PORT))
    while not handle.status().is_seeding:
        time.sleep(0.01)
    done_at = time.monotonic()
    if role != "seed":
        while (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != expected(signals):
            time.sleep(0.05)  # verified pieces are still being written
        part = signals / f"{address}.part"
        part.write_text(f"{done_at} {digest}")
        part.rename(signals / f"{address}.done")
    time.sleep(END_S)


def expected(signals: Path) -> str:
    return (signals / "sha256").read_text()


if __name__ == "__main__":
    main(*sys.argv[1:])
