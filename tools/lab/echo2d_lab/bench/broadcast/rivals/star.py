"""A plain download, for `baselines`: the seed sends the file to every peer at once, and no peer passes it on.

In warm rounds a peer asks over the connection that it has kept since its first version.
"""

import socket
import struct
import threading

from echo2d_lab.bench.broadcast.rivals.node import RivalNode, RivalOffer, obey

BUFFER_BYTES = 1 << 20
NUMBER = struct.Struct("!Q")  # the version asked for; in the answer the file's size


class Star:
    def __init__(self, node: RivalNode) -> None:
        self._node = node
        self._connection: socket.socket | None = None
        if node.is_seed:
            server = socket.create_server((node.address, node.port), backlog=64)
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def prepare(self, offer: RivalOffer) -> None:
        """A plain download prepares nothing."""

    def fetch(self, offer: RivalOffer) -> None:
        if self._connection is None:
            self._connection = socket.create_connection((self._node.addresses[0], self._node.port))
        self._connection.sendall(NUMBER.pack(offer.version))
        with self._node.file(offer.version).open("wb") as content:
            left = NUMBER.unpack(self._connection.recv(NUMBER.size, socket.MSG_WAITALL))[0]
            while left:
                data = self._connection.recv(min(left, BUFFER_BYTES))
                if not data:
                    raise ConnectionError("the seed has closed the connection")
                content.write(data)
                left -= len(data)

    def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._send_all, args=(connection,), daemon=True).start()

    def _send_all(self, connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(NUMBER.size, socket.MSG_WAITALL):
                file = self._node.file(NUMBER.unpack(asked)[0])
                connection.sendall(NUMBER.pack(file.stat().st_size))
                with file.open("rb") as content:
                    connection.sendfile(content)


if __name__ == "__main__":
    own = RivalNode.of_arguments()
    obey(own, Star(own))
