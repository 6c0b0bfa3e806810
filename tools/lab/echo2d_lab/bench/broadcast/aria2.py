"""One peer of a BitTorrent swarm of aria2c, for `baselines`, with a tracker of its own beside the seed.

`aria2.py seed|peer OWN_ADDRESS SIGNALS FILE ADDRESSES...`, the seed's address first. A stand-alone script.
"""

import hashlib
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

PORT, TRACKER_PORT = 6881, 6969
PIECE_BYTES = 256 << 10
ANNOUNCE_S = 2
POLL_S = 0.005
OPTIONS = (
    "--enable-dht=false", "--bt-enable-lpd=false", "--file-allocation=none", "--seed-ratio=0.0", "--quiet=true",
    f"--listen-port={PORT}", "--bt-max-peers=0", "--bt-request-peer-speed-limit=0", "--allow-overwrite=true",
    "--max-upload-limit=0", "--bt-tracker-connect-timeout=5", "--no-conf=true",
)  # fmt: skip


def bencode(value: object) -> bytes:
    """BEP 3. Keys of a dictionary are given in order."""
    match value:
        case int():
            return b"i%de" % value
        case bytes():
            return b"%d:%s" % (len(value), value)
        case str():
            return bencode(value.encode())
        case dict():
            return (
                b"d" + b"".join(bencode(key) + bencode(each) for key, each in value.items()) + b"e"
            )
    raise TypeError(value)


def make_torrent(file: Path, torrent: Path, tracker: str) -> None:
    content = file.read_bytes()
    pieces = b"".join(
        hashlib.sha1(content[at : at + PIECE_BYTES]).digest()
        for at in range(0, len(content), PIECE_BYTES)
    )
    info = {
        "length": len(content),
        "name": file.name,
        "piece length": PIECE_BYTES,
        "pieces": pieces,
    }
    part = torrent.with_suffix(".part")
    part.write_bytes(bencode({"announce": tracker, "info": info}))
    part.rename(torrent)


class Tracker(BaseHTTPRequestHandler):
    """Tells everybody of everybody."""

    known: ClassVar[dict[tuple[str, int], None]] = {}

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, encoding="latin-1")
        self.known[self.client_address[0], int(query["port"][0])] = None
        peers = b"".join(
            socket.inet_aton(host) + port.to_bytes(2, "big") for host, port in list(self.known)
        )
        body = bencode({"interval": ANNOUNCE_S, "min interval": ANNOUNCE_S, "peers": peers})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(POLL_S)


def start(torrent: Path, file: Path, *options: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["aria2c", *OPTIONS, *options, f"--dir={file.parent}", str(torrent)])


def main(role: str, address: str, signals_text: str, file_text: str, *_: str) -> None:
    signals, file = Path(signals_text), Path(file_text)
    torrent = signals / "swarm.torrent"
    if role == "seed":
        server = ThreadingHTTPServer((address, TRACKER_PORT), Tracker)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        make_torrent(file, torrent, f"http://{address}:{TRACKER_PORT}/announce")
        running = start(torrent, file, "--check-integrity=true")
        while not Tracker.known:
            time.sleep(POLL_S)
    wait_for(torrent)
    (signals / f"{address}.ready").touch()
    wait_for(signals / "go")
    if role != "seed":
        script = file.parent / "done.sh"
        script.write_text(f"#!/bin/sh\ntouch {file.parent}/done\n")
        script.chmod(0o755)
        running = start(torrent, file, f"--on-bt-download-complete={script}")
        wait_for(file.parent / "done")
        done_at = time.monotonic()
        part = signals / f"{address}.part"
        part.write_text(f"{done_at} {hashlib.sha256(file.read_bytes()).hexdigest()}")
        part.rename(signals / f"{address}.done")
    running.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
