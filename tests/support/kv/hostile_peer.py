"""A TCP peer that has real blocks, knows the secret, and does with them as it is told.

The blocks are those that an engine has put into a shared directory: both connectors seal alike.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from troupellm.models.hub.secret import derived_key, read_secret
from troupellm_tcp_peer import wire as tcp_wire

Ill = Callable[["HostilePeer", socket.socket, bytes], None]


class HostilePeer:
    """Answers `contains` truthfully. `ill` sends what it likes instead of a block, given the block's frame."""

    def __init__(self, folder: Path, secret: Path, ill: Ill | None = None) -> None:
        self._frames = {bytes.fromhex(path.stem): path for path in folder.rglob("*.kv")}
        assert self._frames, "there are no blocks to hand over"
        self._key = derived_key(read_secret(secret), "tcp-peer handshake")
        self._ill = ill
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.released = threading.Event()
        """Stalled answers wait for this."""
        self.num_asked = 0
        """Blocks that were asked for."""
        self._connections: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.vanish()
        for thread in self._threads:
            thread.join()

    def other_than(self, frame: bytes) -> bytes:
        """Another block's frame."""
        return next(other for path in self._frames.values() if (other := path.read_bytes()) != frame)

    def vanish(self) -> None:
        """Close everything."""
        for each in (self._listener, *list(self._connections)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            greeting = tcp_wire.GREETING.pack(
                tcp_wire.MAGIC, tcp_wire.VERSION, secrets.token_bytes(tcp_wire.CHALLENGE_BYTES)
            )
            connection.sendall(greeting)
            claim = _exactly(connection, tcp_wire.CLAIM.size)
            _exactly(connection, tcp_wire.PROOF_BYTES)
            proof = tcp_wire.proof(self._key, b"server", greeting, claim)
            connection.sendall(tcp_wire.VERDICT.pack(tcp_wire.ACCEPTED, proof))
            while True:
                what, count, size = tcp_wire.read_question(_exactly(connection, tcp_wire.QUESTION.size))
                keys = tcp_wire.read_keys(_exactly(connection, size), count)
                if what == tcp_wire.CONTAINS:
                    has = next((index for index, key in enumerate(keys) if key not in self._frames), len(keys))
                    connection.sendall(tcp_wire.COUNT.pack(has))
                else:
                    self._hand_over(connection, keys)
        self._connections.discard(connection)

    def _hand_over(self, connection: socket.socket, keys: list[bytes]) -> None:
        for key in keys:
            self.num_asked += 1
            frame = self._frames[key].read_bytes()
            if self._ill is None:
                connection.sendall(b"\1" + frame)
            else:
                self._ill(self, connection, frame)


def dies(peer: HostilePeer, connection: socket.socket, frame: bytes) -> None:
    """In the middle of a block."""
    connection.sendall(b"\1" + frame[: len(frame) // 2])
    raise EOFError


def flips(peer: HostilePeer, connection: socket.socket, frame: bytes) -> None:
    """One bit of the content."""
    damaged = bytearray(frame)
    damaged[len(damaged) // 2] ^= 16
    connection.sendall(b"\1" + damaged)


def swaps(peer: HostilePeer, connection: socket.socket, frame: bytes) -> None:
    """A sound block, of another prefix."""
    connection.sendall(b"\1" + peer.other_than(frame))


def lies(peer: HostilePeer, connection: socket.socket, frame: bytes) -> None:
    """It said that it has the block."""
    connection.sendall(b"\0")


def stalls(peer: HostilePeer, connection: socket.socket, frame: bytes) -> None:
    """In the middle of a block, for ever."""
    connection.sendall(b"\1" + frame[: len(frame) // 2])
    peer.released.wait()
    raise EOFError


def babbles(peer: HostilePeer, connection: socket.socket, frame: bytes) -> None:
    """Bytes of another protocol."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 1000)


def vanishes(peer: HostilePeer, connection: socket.socket, frame: bytes) -> None:
    """The whole process."""
    peer.vanish()
    raise EOFError


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
