"""One peer of a BitTorrent swarm of aria2c, for `baselines`, with a tracker of its own beside the seed.

aria2c runs as a daemon that takes orders by JSON-RPC. In warm rounds daemon and tracker keep running, and the tracker
knows every peer when the clock starts. A connection belongs to one torrent, so no connection can be kept.
"""

import base64
import hashlib
import http.client
import json
import os
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from echo2d_lab.bench.broadcast.rivals.node import RivalNode, RivalOffer, obey

PIECE_BYTES = 256 << 10
ANNOUNCE_S = 2
POLL_S = 0.02  # seconds between two polls, which all happen before the clock starts
START_S = 20.0
OPTIONS = (
    "--enable-dht=false", "--bt-enable-lpd=false", "--file-allocation=none", "--seed-ratio=0.0", "--quiet=true",
    "--bt-max-peers=0", "--bt-request-peer-speed-limit=0", "--allow-overwrite=true", "--max-upload-limit=0",
    "--bt-tracker-connect-timeout=5", "--no-conf=true", "--enable-rpc=true", "--max-concurrent-downloads=100",
    "--bt-save-metadata=false", "--rpc-save-upload-metadata=false", "--follow-torrent=false",
)  # fmt: skip


def bencode(value: object) -> bytes:
    """A value in the encoding of BEP 3. The keys of a dictionary must be in order."""
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
    torrent.write_bytes(bencode({"announce": tracker, "info": info}))


class Tracker(BaseHTTPRequestHandler):
    """Gives every peer the addresses of all peers. A peer has one port for all versions."""

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


class Aria2:
    """One daemon. The first port is the tracker's; then each node has two."""

    def __init__(self, node: RivalNode) -> None:
        self._node = node
        self._gid: str | None = None
        self._rpc_port = node.port + 2 + 2 * node.number
        if node.is_seed:
            server = ThreadingHTTPServer((node.address, node.port), Tracker)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        # aria2c runs a program when a download is complete; this one writes the file's path into a pipe.
        pipe, script = node.folder / "complete", node.folder / "complete.sh"
        os.mkfifo(pipe)
        self._complete = open(os.open(pipe, os.O_RDWR), encoding="utf-8")  # noqa: SIM115, PTH123
        script.write_text(f'#!/bin/sh\necho "$3" > "{pipe}"\n')
        script.chmod(0o755)
        subprocess.Popen(
            [
                "aria2c",
                *OPTIONS,
                f"--listen-port={node.port + 1 + 2 * node.number}",
                f"--rpc-listen-port={self._rpc_port}",
                f"--stop-with-process={os.getpid()}",
                f"--on-bt-download-complete={script}",
            ]
        )
        self._wait_for_daemon()

    def prepare(self, offer: RivalOffer) -> None:
        if self._gid is not None:
            self._call("aria2.forceRemove", self._gid)
            self._gid = None
        if self._node.is_seed:
            tracker = f"http://{self._node.address}:{self._node.port}/announce"
            torrent = self._node.torrent(offer.version)
            make_torrent(self._node.file(offer.version), torrent, tracker)
            self._add(offer)
            while not self._is_seeding():
                time.sleep(POLL_S)

    def fetch(self, offer: RivalOffer) -> None:
        self._add(offer)
        while Path(self._complete.readline().strip()) != self._node.file(offer.version):
            pass  # the line is about an earlier version

    def _add(self, offer: RivalOffer) -> None:
        torrent = base64.b64encode(self._node.torrent(offer.version).read_bytes()).decode()
        options = {"dir": str(self._node.folder)}
        if self._node.is_seed:
            options["check-integrity"] = "true"
        self._gid = self._call("aria2.addTorrent", torrent, [], options)

    def _is_seeding(self) -> bool:
        """Whether the daemon seeds and the tracker knows it, so that every peer that asks gets its address."""
        facts = self._call("aria2.tellStatus", self._gid, ["seeder"])
        return facts.get("seeder") == "true" and bool(Tracker.known)

    def _wait_for_daemon(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._call("aria2.getVersion")
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
            else:
                return

    def _call(self, method: str, *parameters: object) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._rpc_port)
        body = json.dumps({"jsonrpc": "2.0", "id": "1", "method": method, "params": parameters})
        try:
            connection.request("POST", "/jsonrpc", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]


if __name__ == "__main__":
    own = RivalNode.of_arguments()
    obey(own, Aria2(own))
