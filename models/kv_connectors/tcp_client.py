"""Asks another engine for blocks, over a few connections that are kept."""

import hmac
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from troupellm.models.kv_connectors import tcp_wire
from troupellm.models.kv_connectors.sealed_block import BlockSignature
from troupellm.models.kv_connectors.tcp_run import Run
from troupellm.models.kv_connectors.tcp_wire import Wire, WireError
from troupellm.models.kv_offload.store import StoreCorrupt, StoreError, StoreMiss

MOST_IDLE = 4
"""Connections that wait for their next use."""
MOST_RUNS = 4
"""Runs (questions whose answers have not all been taken); the oldest one is dropped for a new one."""
AHEAD = 8
"""Number of blocks requested at once, where the keys that follow are known."""
REMEMBERED = 65_536
"""Number of keys whose successor is remembered."""

AnswerT = TypeVar("AnswerT")


class PeerClient:
    """One peer. Safe in any thread."""

    def __init__(self, address: tuple[str, int], key: bytes, signature: BlockSignature, seconds: float) -> None:
        """seconds: that one call may take, connecting included."""
        self.address, self._key, self._signature, self._seconds = address, key, signature, seconds
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._following: OrderedDict[bytes, bytes] = OrderedDict()
        self._runs: OrderedDict[Run, None] = OrderedDict()
        """Runs with blocks that have not been requested yet, oldest first."""
        self._run_of: dict[bytes, Run] = {}
        self._lock = threading.Lock()
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> int:
        """The number of keys that the peer has, counted from the first on.

        Raises:
            StoreError: it cannot be asked.
        """
        keys = keys[: tcp_wire.MOST_KEYS]

        def ask(connected: Wire) -> int:
            connected.send(tcp_wire.question(tcp_wire.CONTAINS, keys))
            (count,) = tcp_wire.COUNT.unpack(connected.receive(tcp_wire.COUNT.size))
            if count > len(keys):
                raise WireError("the peer says that it has more than it was asked for")
            return int(count)

        count = self._call(ask) if keys else 0
        self._remember(keys[:count])
        return count

    def get(self, key: bytes, into: memoryview) -> None:
        """A whole, verified block. Those that follow it are asked for on the way.

        Raises:
            StoreMiss: the peer does not have it, or sent something other than this block.
            StoreError: it cannot be asked.
        """
        with self._lock:
            run = self._run_of.pop(key, None)
        header: bytes | None = None
        if run is not None:
            try:
                header = self._read(run, key, into)
            except (WireError, OSError):  # the run was idle for too long, and the peer gave it up
                run = None
        if run is None:
            run = self._claim(key)
            header = self._begin(run, into)
        if header is None:
            raise StoreMiss(key.hex())
        try:
            self._signature.check(key, header, into)
        except StoreCorrupt:
            self._distrust(run)
            raise

    def reset(self) -> None:
        """Have the peer forget its blocks, and drop the blocks that were read ahead.

        Raises:
            StoreError: it cannot be asked.
        """
        with self._lock:
            runs = list(self._runs)
            self._following.clear()
        for run in runs:
            self._abandon(run)

        def ask(connected: Wire) -> None:
            connected.send(tcp_wire.reset_question())
            connected.receive(tcp_wire.COUNT.size)

        self._call(ask)

    def probe(self) -> None:
        """Connect.

        Raises:
            StoreError: that does not succeed.
        """
        self._call(lambda connected: None, fresh=True)

    def close(self) -> None:
        """End all requests under way."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy, runs = list(self._busy), list(self._runs)
        for connected in (*idle, *busy):
            connected.shut()
        for connected in idle:
            connected.close()
        for run in runs:
            if not run.turn.locked():  # otherwise closing the connection ends the read of the thread that has the turn
                self._abandon(run)

    def _claim(self, key: bytes) -> Run:
        """Claim the key and the unclaimed ones that follow it; the caller has the run's first turn."""
        keys, oldest = [key], None
        with self._lock:
            while len(keys) < AHEAD:
                following = self._following.get(keys[-1])
                if following is None or following in self._run_of or following in keys:
                    break
                keys.append(following)
            run = Run(keys, self._signature.block_bytes)
            run.turn.acquire()
            if len(keys) > 1:
                if len(self._runs) >= MOST_RUNS:
                    oldest = next((waits for waits in self._runs if not waits.turn.locked()), None)
                if oldest is not None:
                    self._forget(oldest)
                self._runs[run] = None
                self._run_of.update(dict.fromkeys(keys[1:], run))
        if oldest is not None:
            self._abandon(oldest)
        return run

    def _begin(self, run: Run, into: memoryview) -> bytes | None:
        good = False
        try:
            header = self._call(lambda connected: run.begin(connected, into), run=run)
            good = True
            return header
        finally:
            run.turn.release()
            if not good:
                self._abandon(run)

    def _read(self, run: Run, key: bytes, into: memoryview) -> bytes | None:
        try:
            header, read_up = run.read(key, into, self._seconds)
        except BaseException:
            self._abandon(run)
            raise
        with self._lock:
            connected = None
            if read_up:  # what it has read too early it may keep, as one of the runs that give way
                connected, run.connected = run.connected, None
            if run.connected is None and not any(self._run_of.get(each) is run for each in run.keys):
                self._runs.pop(run, None)
        if connected is not None:
            self._put_back(connected, good=True)
        return header

    def _abandon(self, run: Run) -> None:
        """Close its connection once no thread reads from it; waiting callers ask again. Idempotent."""
        run.broken = True
        connected = run.connected
        if connected is not None:
            connected.shut()
        with run.turn, self._lock:
            connected, run.connected = run.connected, None
            self._forget(run)
        if connected is not None:
            self._put_back(connected, good=False)

    def _forget(self, run: Run) -> None:
        """With the lock held: remove the run from all indexes."""
        self._runs.pop(run, None)
        for key in run.keys:
            if self._run_of.get(key) is run:
                del self._run_of[key]

    def _distrust(self, run: Run) -> None:
        """The received block failed its check: close this connection and all idle ones."""
        self._abandon(run)
        with self._lock:
            idle, self._idle = self._idle, []
        for connected in idle:
            connected.close()

    def _remember(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key, following in pairwise(keys):
                self._following[key] = following
                self._following.move_to_end(key)
            while len(self._following) > REMEMBERED:
                self._following.popitem(last=False)

    def _call(self, ask: Callable[[Wire], AnswerT], *, fresh: bool = False, run: Run | None = None) -> AnswerT:
        """Ask the peer. It may have closed an idle connection meanwhile: then a new one is tried."""
        try:
            connected = None if fresh else self._kept()
            if connected is not None:
                try:
                    return self._asked(connected, ask, run)
                except (tcp_wire.WireClosed, ConnectionError):
                    pass
            return self._asked(self._connect(), ask, run)
        except WireError as error:
            raise StoreError(str(error)) from error
        except OSError as error:
            raise StoreError(f"the peer cannot be reached: {error.strerror or error}") from error

    def _asked(self, connected: Wire, ask: Callable[[Wire], AnswerT], run: Run | None) -> AnswerT:
        """The connection is free again, unless a run goes on with it."""
        good = False
        try:
            connected.within(self._seconds)
            answer = ask(connected)
            good = True
            return answer
        finally:
            goes_on = False
            if run is not None and good:
                good = run.read_up
                with self._lock:
                    goes_on = not good and run in self._runs and not self._closed
            if not goes_on:
                self._put_back(connected, good=good)

    def _put_back(self, connected: Wire, *, good: bool) -> None:
        with self._lock:
            if connected not in self._busy:
                return
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
            self._put_back(connected, good=False)
            raise
        return connected

    def _greet(self, connected: Wire) -> None:
        greeting = connected.receive(tcp_wire.GREETING.size)
        if tcp_wire.GREETING.unpack(greeting)[:2] != (tcp_wire.MAGIC, tcp_wire.VERSION):
            raise WireError("the peer does not speak this protocol, or another version of it")
        signature, challenge = self._signature, secrets.token_bytes(tcp_wire.CHALLENGE_BYTES)
        claim = tcp_wire.CLAIM.pack(
            tcp_wire.MAGIC, tcp_wire.VERSION, signature.block_bytes, signature.fingerprint, challenge
        )
        connected.send(claim, tcp_wire.proof(self._key, b"client", greeting, claim))
        try:
            verdict, given = tcp_wire.VERDICT.unpack(connected.receive(tcp_wire.VERDICT.size))
        except tcp_wire.WireClosed:
            raise WireError("the peer refused the connection: it has another secret, or too many connections") from None
        if not hmac.compare_digest(given, tcp_wire.proof(self._key, b"server", greeting, claim)):
            raise WireError("the peer does not know the secret")
        if verdict != tcp_wire.ACCEPTED:
            raise WireError("the peer has blocks of another model or setting")
