"""Blocks that are requested together: one question for several keys, whose answers are read as they are wanted.

Several blocks share one round trip, and the connection stays busy while blocks are verified. Answers come in the order
of the question. Blocks before the wanted one are kept until they are wanted, so a run holds at most its own blocks.
"""

from collections import deque
from collections.abc import Sequence
from threading import Lock

from troupellm import BlockSignature
from troupellm_tcp_peer import wire
from troupellm_tcp_peer.wire import Wire, WireError


class Run:
    """One question and its answers, on a connection that serves nothing else meanwhile.

    Its maker holds `turn` before other threads can find it and until `begin` has returned; `read` waits for that.
    """

    def __init__(self, keys: Sequence[bytes], signature: BlockSignature) -> None:
        """keys: the requested ones; the caller of `begin` reads the first."""
        self.keys = tuple(keys)
        self.turn = Lock()
        self.connected: Wire | None = None
        self.broken = False
        """No more answers may be read."""
        self._signature = signature
        self._due: deque[bytes] = deque()
        self._early: dict[bytes, tuple[bytes, bytearray] | None] = {}

    @property
    def read_up(self) -> bool:
        """Nothing more comes on the connection; call with the turn held."""
        return not self._due

    def begin(self, connected: Wire, into: memoryview) -> bytes | None:
        """Ask, and read the first block; again on another connection if this one was of no use. As `read`."""
        self.connected, self._due = connected, deque(self.keys)
        connected.send(wire.question(wire.GET, self.keys))
        self._due.popleft()
        return self._read_block(connected, into)

    def read(self, key: bytes, into: memoryview, seconds: float) -> tuple[bytes | None, bool]:
        """The header of a block whose content is in `into` now, None if the peer does not have it; and whether nothing
        more comes on the connection.

        Raises:
            WireError, OSError: the connection is of no use any more.
        """
        with self.turn:
            if key not in self._early:
                header = self._read_up_to(key, into, seconds)
            elif (early := self._early.pop(key)) is None:
                header = None
            else:
                header, into[:] = early
            return header, self.read_up

    def _read_up_to(self, key: bytes, into: memoryview, seconds: float) -> bytes | None:
        while not self.broken and self.connected is not None and self._due:
            self.connected.within(seconds)
            following = self._due.popleft()
            if following == key:
                return self._read_block(self.connected, into)
            early = bytearray(self._signature.block_bytes)
            header = self._read_block(self.connected, memoryview(early))
            self._early[following] = None if header is None else (header, early)
        raise WireError("the peer was not asked for this block in the end")

    def _read_block(self, connected: Wire, into: memoryview) -> bytes | None:
        """Read one answer."""
        (present,) = wire.PRESENT.unpack(connected.receive(wire.PRESENT.size))
        if present > 1:
            raise WireError("the peer sent something else than a block")
        if not present:
            return None
        header = connected.receive(self._signature.frame_bytes - self._signature.block_bytes)
        connected.receive_into(into)
        return header
