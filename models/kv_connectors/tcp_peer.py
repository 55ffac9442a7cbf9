"""The `tcp-peer` connector: blocks go from one engine to another one over TCP.

An engine that produces puts its blocks into a block LRU of bounded size and serves them; one that consumes asks its
peers in turn. Any failure between them is a miss, or an error of the tier, which then leaves the peers alone for a
while.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from time import monotonic

import msgspec

from troupellm.models.kv_connectors.base import ConnectorContext
from troupellm.models.kv_connectors.tcp_block_lru import BlockLru
from troupellm.models.kv_connectors.tcp_client import PeerClient
from troupellm.models.kv_connectors.tcp_server import PeerServer
from troupellm.models.kv_offload.store import BlockStore, StoreCorrupt, StoreError, StoreMiss, StoreUse

NAME = "tcp-peer"
LOOPBACK = "127.0.0.1"
DEFAULT_BYTES = 2**30
MOST_PEERS = 16
REMEMBERED = 65_536
"""Number of keys for which the peer that has them is remembered."""
REST_SECONDS = 5.0
_SHARE = 0.8
"""Share of an operation's deadline after which a request to a peer is given up, so that the tier's is not."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of a TCP peer."""

    listen: str | int | None = None
    """Address at which blocks are served, host:port or a port on loopback; for engines that produce."""
    peers: list[str] | str = []
    """Addresses of engines that serve, nearest first; of engines that consume."""
    bytes: int | str = DEFAULT_BYTES
    """Memory for the blocks that are served, beside the host tier."""
    max_connections: int = 32


def open_tcp_peer(context: ConnectorContext) -> "TcpPeer":
    """
    Raises:
        ConfigError: an option is wrong, or its address cannot be listened at.
    """
    options, config = context.options(Options), context.config
    peers = [options.peers] if isinstance(options.peers, str) else options.peers
    if config.produces and options.listen is None:
        raise context.refuse("listen", "is missing: where are blocks served? give host:port, or a port on loopback")
    if config.consumes and not peers:
        raise context.refuse("peers", "is missing: which engines serve blocks? give host:port of each")
    if not config.produces and options.listen is not None:
        raise context.refuse("listen", "is of no use to a kv_consumer")
    if not config.consumes and peers:
        raise context.refuse("peers", "are of no use to a kv_producer")
    if len(peers) > MOST_PEERS:
        raise context.refuse("peers", f"may be {MOST_PEERS} at most")
    if not 1 <= options.max_connections <= 1024:
        raise context.refuse("max_connections", "must be between 1 and 1024")
    key, signature = context.key("handshake"), context.signature
    seconds = context.store.timeout * _SHARE / max(1, len(peers))
    clients = [PeerClient(_address(context, "peers", peer), key, signature, seconds) for peer in peers]
    block_lru = server = None
    if options.listen is not None:
        address = _address(context, "listen", options.listen)
        block_lru = BlockLru(signature, context.size("bytes", options.bytes))
        try:
            server = PeerServer(
                address, key, signature, block_lru, most=options.max_connections, seconds=context.store.timeout
            )
        except OSError as error:
            raise context.refuse("listen", f"cannot be listened at: {error.strerror or error}") from error
    return TcpPeer(clients, block_lru, server)


class TcpPeer(BlockStore):
    name = NAME

    def __init__(self, clients: Sequence[PeerClient], block_lru: BlockLru | None, server: PeerServer | None) -> None:
        """Either of them may be left out; not all."""
        self._clients, self._served, self.server = tuple(clients), block_lru, server
        self._owner: OrderedDict[bytes, PeerClient] = OrderedDict()
        self._resting: dict[PeerClient, float] = {}
        """Peers that could not be asked, and until when they are left alone if there are others."""
        self._owed: set[PeerClient] = set()
        """Peers that could not be reached for a reset: it is sent before the next question."""
        self._lock = Lock()

    def probe(self) -> None:
        """Check that at least one peer answers."""
        problem = ""
        for client in self._clients:
            try:
                client.probe()
                self._settle(client)
            except StoreError as error:
                problem = self._rest(client, error)
            else:
                self._resting.pop(client, None)
                return
        if problem:
            raise StoreError(problem)

    def contains(self, keys: Sequence[bytes]) -> int:
        best, answered, problem = 0, False, ""
        for client in self._awake():
            try:
                self._settle(client)
                count = client.contains(keys)
            except StoreError as error:
                problem = self._rest(client, error)
                continue
            answered = True
            if count > best:
                self._remember(keys[best:count], client)
                best = count
            if best == len(keys):
                break
        if problem and not answered:
            raise StoreError(problem)
        return best

    def put(self, key: bytes, data: memoryview) -> None:
        if self._served is not None:
            self._served.put(key, data)

    def get(self, key: bytes, into: memoryview) -> None:
        with self._lock:
            owner = self._owner.get(key)
        others = [client for client in self._awake() if client is not owner]
        miss, problem = StoreMiss(key.hex()), ""
        answered = False
        for client in others if owner is None else [owner, *others]:
            try:
                self._settle(client)
                client.get(key, into)
            except StoreMiss as found:
                answered = True
                miss = found if isinstance(found, StoreCorrupt) else miss
            except StoreError as error:
                problem = self._rest(client, error)
            else:
                return
        if problem and not answered:
            raise StoreError(problem)
        raise miss

    def reset(self) -> None:
        """As `BlockStore`. A peer that cannot be reached now gets the reset before the next question."""
        if self._served is not None:
            self._served.clear()
        with self._lock:
            self._owner.clear()
            self._owed.update(self._clients)
        for client in self._clients:
            try:
                self._settle(client)
            except StoreError as error:
                self._rest(client, error)

    def use(self) -> StoreUse:
        return StoreUse() if self._served is None else self._served.use()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self.server is not None:
            self.server.close()
        if self._served is not None:
            self._served.clear()

    def _awake(self) -> Sequence[PeerClient]:
        """Peers to ask; all where all rest."""
        if not self._resting:
            return self._clients
        now = monotonic()
        return [client for client in self._clients if self._resting.get(client, 0.0) <= now] or self._clients

    def _settle(self, client: PeerClient) -> None:
        if client in self._owed:
            client.reset()
            self._owed.discard(client)

    def _rest(self, client: PeerClient, error: StoreError) -> str:
        self._resting[client] = monotonic() + REST_SECONDS
        return f"{client.address[0]}:{client.address[1]}: {error}"

    def _remember(self, keys: Sequence[bytes], client: PeerClient) -> None:
        if len(self._clients) == 1:
            return
        with self._lock:
            for key in keys:
                self._owner[key] = client
                self._owner.move_to_end(key)
            while len(self._owner) > REMEMBERED:
                self._owner.popitem(last=False)


def _address(context: ConnectorContext, option: str, given: str | int) -> tuple[str, int]:
    """host:port, [host]:port, or a port on loopback."""
    host, _, port = str(given).rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65_535:
        raise context.refuse(option, f"must be host:port, or a port on loopback, got {given!r}")
    if option == "peers" and int(port) == 0:
        raise context.refuse(option, "must name a port above 0")
    return host, int(port)
