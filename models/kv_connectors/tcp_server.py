"""Hands blocks over to engines that know the secret: a thread that accepts, and one for each connection."""

import contextlib
import hmac
import logging
import secrets
import socket
import threading

from troupellm.models.kv_connectors import tcp_wire
from troupellm.models.kv_connectors.sealed_block import BlockSignature
from troupellm.models.kv_connectors.tcp_block_lru import BlockLru
from troupellm.models.kv_connectors.tcp_wire import Wire, WireError

logger = logging.getLogger("troupellm.worker")

HANDSHAKE_SECONDS = 5.0
IDLE_SECONDS = 600.0
"""A connection without a question for this time is closed; clients open another one when they need it."""
CLOSE_SECONDS = 5.0
PAUSE_SECONDS = 0.1
"""Before another try to accept, after one that failed."""
_BACKLOG = 16


class PeerServer:
    """Serves a block LRU. Connections above the limit are closed at once: their engines compute the blocks."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        signature: BlockSignature,
        block_lru: BlockLru,
        *,
        most: int,
        seconds: float,
    ) -> None:
        """
        Args:
            key: that clients prove to know.
            most: connections at once.
            seconds: that a client may take to send a question, or to take one block.

        Raises:
            OSError: the address cannot be listened at.
        """
        self._key, self._signature, self._served, self._most, self._seconds = key, signature, block_lru, most, seconds
        self._listener = socket.create_server(address, backlog=_BACKLOG, family=_family(address[0]))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._wires: dict[Wire, threading.Thread] = {}
        self._closed = threading.Event()
        self.num_refused = 0
        """Connections that were one too many, or did not prove to know the secret."""
        self._thread = threading.Thread(target=self._accept, name="troupellm-kv-peer", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._wires)

    def close(self) -> None:
        """Close all connections and join the threads."""
        with self._lock:
            self._closed.set()
            wires = dict(self._wires)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        for connected in wires:
            connected.shut()
        for thread in (self._thread, *wires.values()):
            thread.join(CLOSE_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # that client has left again, or there are no descriptors left
                if self._closed.wait(PAUSE_SECONDS):
                    return
                continue
            connected = Wire(connection)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                served = self._serve(connected)
            except (OSError, RuntimeError) as error:  # it has left, or there are no threads left
                logger.warning("a peer's connection could not be served: %s", error)
                served = False
            if not served:
                connected.close()

    def _serve(self, connected: Wire) -> bool:
        """False: there are too many already."""
        thread = threading.Thread(target=self._run, args=(connected,), name="troupellm-kv-peer-serve", daemon=True)
        with self._lock:
            if self._closed.is_set() or len(self._wires) >= self._most:
                self.num_refused += 1
                return False
            self._wires[connected] = thread  # it may answer before `start` comes back
            try:
                thread.start()
            except RuntimeError:
                del self._wires[connected]
                raise
        return True

    def _run(self, connected: Wire) -> None:
        try:
            if self._greet(connected):
                while True:
                    self._answer(connected)
        except (WireError, OSError):
            pass  # its end, or its fault: it hears nothing more
        finally:
            with self._lock:
                del self._wires[connected]
            connected.close()

    def _greet(self, connected: Wire) -> bool:
        """True if the other side knows the secret and wants blocks of this model and size."""
        connected.within(HANDSHAKE_SECONDS)
        greeting = tcp_wire.GREETING.pack(
            tcp_wire.MAGIC, tcp_wire.VERSION, secrets.token_bytes(tcp_wire.CHALLENGE_BYTES)
        )
        connected.send(greeting)
        claim = connected.receive(tcp_wire.CLAIM.size)
        given = connected.receive(tcp_wire.PROOF_BYTES)
        magic, version, block_bytes, fingerprint, _ = tcp_wire.CLAIM.unpack(claim)
        known = hmac.compare_digest(given, tcp_wire.proof(self._key, b"client", greeting, claim))
        if (magic, version) != (tcp_wire.MAGIC, tcp_wire.VERSION) or not known:
            with self._lock:
                self.num_refused += 1
            return False
        same = (block_bytes, fingerprint) == (self._signature.block_bytes, self._signature.fingerprint)
        verdict = tcp_wire.ACCEPTED if same else tcp_wire.OTHER_BLOCKS
        connected.send(tcp_wire.VERDICT.pack(verdict, tcp_wire.proof(self._key, b"server", greeting, claim)))
        return same

    def _answer(self, connected: Wire) -> None:
        connected.within(IDLE_SECONDS)
        head = connected.receive(tcp_wire.QUESTION.size)
        connected.within(self._seconds)
        what, count, size = tcp_wire.read_question(head)
        if what == tcp_wire.RESET:
            self._served.clear()
            connected.send(tcp_wire.COUNT.pack(0))
            return
        keys = tcp_wire.read_keys(connected.receive(size), count)
        if what == tcp_wire.CONTAINS:
            connected.send(tcp_wire.COUNT.pack(self._served.count(keys)))
            return
        for key in keys:
            connected.within(self._seconds)
            found = self._served.find(key)
            if found is None:
                connected.send(tcp_wire.PRESENT.pack(0))
            else:
                header, content = found
                connected.send(tcp_wire.PRESENT.pack(1) + header, content)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
