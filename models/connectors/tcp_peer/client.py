"""Asks another engine for blocks, over a few connections that are kept."""

import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from troupellm.models.connectors.seal import HEADER_BYTES, Seal
from troupellm.models.connectors.tcp_peer import wire
from troupellm.models.connectors.tcp_peer.wire import Wire, WireError
from troupellm.models.offload.store import StoreCorrupt, StoreError, StoreMiss

MOST_IDLE = 4
"""Connections that wait for their next use."""

AnswerT = TypeVar("AnswerT")


class PeerClient:
    """One peer. Safe in any thread; each call has a connection of its own while it lasts."""

    def __init__(self, address: tuple[str, int], key: bytes, seal: Seal, seconds: float) -> None:
        """seconds: that one call may take, connecting included."""
        self.address, self._key, self._seal, self._seconds = address, key, seal, seconds
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._lock = threading.Lock()
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many of the keys the peer has, from the first on.

        Raises:
            StoreError: it cannot be asked.
        """
        keys = keys[: wire.MOST_KEYS]

        def ask(connected: Wire) -> int:
            connected.send(wire.question(wire.CONTAINS, keys))
            (count,) = wire.COUNT.unpack(connected.receive(wire.COUNT.size))
            if count > len(keys):
                raise WireError("the peer says that it has more than it was asked for")
            return int(count)

        return self._call(ask) if keys else 0

    def get(self, key: bytes, into: memoryview) -> None:
        """A whole, verified block.

        Raises:
            StoreMiss: the peer does not have it, or what it sent is not this block.
            StoreError: it cannot be asked.
        """
        if not self._call(lambda connected: self._get(connected, key, into)):
            raise StoreMiss(key.hex())

    def probe(self) -> None:
        """Connect.

        Raises:
            StoreError: that does not succeed.
        """
        self._call(lambda connected: None, fresh=True)

    def close(self) -> None:
        """End what is under way."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connected in idle:
            connected.close()
        for connected in busy:
            connected.shut()

    def _get(self, connected: Wire, key: bytes, into: memoryview) -> bool:
        connected.send(wire.question(wire.GET, (key,)))
        (present,) = wire.PRESENT.unpack(connected.receive(wire.PRESENT.size))
        if present > 1:
            raise WireError("the peer sent something else than a block")
        if present:
            header = connected.receive(HEADER_BYTES)
            connected.receive_into(into)
            self._seal.check(key, header, into)
        return bool(present)

    def _call(self, ask: Callable[[Wire], AnswerT], *, fresh: bool = False) -> AnswerT:
        """One that was kept may have been closed by the peer meanwhile: then a new one is tried."""
        try:
            connected = None if fresh else self._kept()
            if connected is not None:
                try:
                    return self._asked(connected, ask)
                except (wire.WireClosed, ConnectionError):
                    pass
            return self._asked(self._connect(), ask)
        except WireError as error:
            raise StoreError(str(error)) from error
        except OSError as error:
            raise StoreError(f"the peer cannot be reached: {error.strerror or error}") from error

    def _asked(self, connected: Wire, ask: Callable[[Wire], AnswerT]) -> AnswerT:
        good = False
        try:
            connected.within(self._seconds)
            answer = ask(connected)
            good = True
            return answer
        except StoreCorrupt:
            raise  # the connection is not to be trusted either
        finally:
            with self._lock:
                self._busy.discard(connected)
                kept = good and not self._closed and len(self._idle) < MOST_IDLE
                if kept:
                    self._idle.append(connected)
            if not kept:
                connected.close()

    def _kept(self) -> Wire | None:
        with self._lock:
            if self._closed or not self._idle:
                return None
            connected = self._idle.pop()
            self._busy.add(connected)
            return connected

    def _connect(self) -> Wire:
        connection = socket.create_connection(self.address, timeout=self._seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected = Wire(connection)
        with self._lock:
            closed = self._closed
            self._busy.add(connected)
        try:
            if closed:
                raise WireError("the connector is closed")
            connected.within(self._seconds)
            self._greet(connected)
        except BaseException:
            with self._lock:
                self._busy.discard(connected)
            connected.close()
            raise
        return connected

    def _greet(self, connected: Wire) -> None:
        greeting = connected.receive(wire.GREETING.size)
        if wire.GREETING.unpack(greeting)[:2] != (wire.MAGIC, wire.VERSION):
            raise WireError("the peer does not speak this protocol, or another version of it")
        seal, challenge = self._seal, secrets.token_bytes(wire.CHALLENGE_BYTES)
        claim = wire.CLAIM.pack(wire.MAGIC, wire.VERSION, seal.block_bytes, seal.fingerprint, challenge)
        connected.send(claim, wire.proof(self._key, b"client", greeting, claim))
        try:
            verdict, given = wire.VERDICT.unpack(connected.receive(wire.VERDICT.size))
        except wire.WireClosed:
            raise WireError("the peer refused the connection: it has another secret, or too many connections") from None
        if not hmac.compare_digest(given, wire.proof(self._key, b"server", greeting, claim)):
            raise WireError("the peer does not know the secret")
        if verdict != wire.ACCEPTED:
            raise WireError("the peer has blocks of another model or setting")
