"""The connections of one listener: how many there may be, and which goes when one more comes."""

import resource

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.http.connection import Connection

RESERVE = 128
"""Descriptors for everything else: an eighth of many, and five eighths of few."""
FEW = 256
"""Connections; a limit on descriptors that leaves less is worth a line in the log."""
MOST = 65_536
"""Where descriptors are not limited."""


class ConnectionLimit:
    """Without a limit of our own, the one on descriptors would keep everybody out for as long as idle clients stay."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._here: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """In the order in which they became so."""
        self.dropped = 0
        """Closed to make room, or because there was none."""

    def __len__(self) -> int:
        return len(self._here)

    def enter(self, connection: Connection) -> bool:
        """If it is full, the longest idle connection is closed; False if none is idle: then there is no room."""
        if len(self._here) >= self._limit:
            self.dropped += 1
            longest = next(iter(self._idle), None)
            if longest is None:
                return False
            del self._idle[longest]
            longest.writer.transport.abort()
        self._here.add(connection)
        self._idle[connection] = None
        connection.on_idle = self._note
        return True

    def leave(self, connection: Connection) -> None:
        self._here.discard(connection)
        self._idle.pop(connection, None)

    def _note(self, connection: Connection, idle: bool) -> None:
        """A connection is idle from its beginning on, and between requests."""
        self._idle.pop(connection, None)
        if idle and connection in self._here and not connection.writer.is_closing():
            self._idle[connection] = None


def connection_limit(config: ServerConfig) -> int:
    """The configured number, or the number that the limit on descriptors leaves."""
    if config.max_connections is not None:
        return config.max_connections
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MOST
    reserve = max(min(RESERVE, descriptors * 5 // 8), descriptors // 8)
    return max(1, min(MOST, descriptors - reserve))


def few_descriptors(config: ServerConfig) -> str | None:
    """The warning where the limit on descriptors leaves few connections, or fewer than are configured."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return None
    room = connection_limit(ServerConfig())
    wanted = FEW if config.max_connections is None else config.max_connections
    if room >= wanted:
        return None
    return (
        f"{descriptors} file descriptors are allowed (ulimit -n), which is enough for {room} connections at once; "
        "more of them need a higher limit"
    )
