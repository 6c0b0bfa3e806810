"""One end of a plain download, for `baselines`: the seed sends the file to everybody at once, nobody passes it on.

`star.py seed|peer OWN_ADDRESS SIGNALS FILE ADDRESSES...`, the seed's address first. A stand-alone script.
"""

import hashlib
import socket
import sys
import threading
import time
from pathlib import Path

PORT = 7800
BUFFER_BYTES = 1 << 20


def serve(address: str, signals: Path, file: Path) -> None:
    with socket.create_server((address, PORT), backlog=64) as server:
        (signals / f"{address}.ready").touch()
        while True:
            connection, _ = server.accept()
            threading.Thread(target=send, args=(connection, file), daemon=True).start()


def send(connection: socket.socket, file: Path) -> None:
    with connection, file.open("rb") as content:
        connection.sendfile(content)


def fetch(address: str, signals: Path, file: Path, seed: str) -> None:
    (signals / f"{address}.ready").touch()
    while not (signals / "go").exists():
        time.sleep(0.002)
    digest = hashlib.sha256()
    with socket.create_connection((seed, PORT)) as connection, file.open("wb") as content:
        while data := connection.recv(BUFFER_BYTES):
            digest.update(data)
            content.write(data)
    part = signals / f"{address}.part"
    part.write_text(f"{time.monotonic()} {digest.hexdigest()}")
    part.rename(signals / f"{address}.done")


def main(role: str, address: str, signals: str, file: str, seed: str, *_: str) -> None:
    if role == "seed":
        serve(address, Path(signals), Path(file))
    else:
        fetch(address, Path(signals), Path(file), seed)


if __name__ == "__main__":
    main(*sys.argv[1:])
