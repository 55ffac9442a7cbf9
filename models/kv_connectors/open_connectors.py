"""The connectors that `kv_transfer_config` names, opened."""

from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

from troupellm.models.hub.secret import read_secret
from troupellm.models.kv_connectors.base import ConnectorContext, MakeConnector
from troupellm.models.kv_connectors.plugin import PlugInStore
from troupellm.models.kv_connectors.shared_directory import NAME as SHARED_DIRECTORY, open_shared_directory
from troupellm.models.kv_connectors.tcp_peer import NAME as TCP_PEER, open_tcp_peer
from troupellm.models.kv_offload.store import BlockStore, StoreContext
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.kv_connectors import FIELD, KVTransferConfig, read_transfer_configs
from troupellm.protocol.errors import ConfigError, TroupeError

GROUP = "troupellm.connectors"
BUILT_IN: Mapping[str, MakeConnector] = {SHARED_DIRECTORY: open_shared_directory, TCP_PEER: open_tcp_peer}
_OWN = ("host", "disk")
"""Tiers of the engine's own, which are known by their names."""
_FROM_VLLM = {
    "OffloadingConnector": "use kv_offloading_size",
    "SimpleCPUOffloadConnector": "use kv_offloading_size",
    "MultiConnector": f"give a list of connectors as {FIELD}",
    "NixlConnector": f"use {TCP_PEER}",
    "ExampleConnector": f"use {SHARED_DIRECTORY}",
}


def open_connectors(config: EngineConfig, store: StoreContext) -> list[BlockStore]:
    """One store per connector, in the order of the configuration; a second one of a kind gets a name that says so. If
    one cannot be opened, the others are closed.

    Raises:
        ConfigError: one is not there, has a wrong setting, or there is no secret to share.
    """
    wanted = read_transfer_configs(config.offload.kv_transfer_config)
    if not wanted:
        return []
    path = config.cache.prefix_hash_secret_file
    if path is None:
        raise ConfigError(
            f"{FIELD} needs prefix_hash_secret_file: engines that share blocks share a secret", param=FIELD
        )
    secret = read_secret(Path(path).expanduser())
    opened: list[BlockStore] = []
    with ExitStack() as stack:
        for number, each in enumerate(wanted):
            opened.append(_open(ConnectorContext(each, store, secret)))
            stack.callback(opened[-1].close)
            before = [other.kv_connector for other in wanted[:number]].count(each.kv_connector)
            if before:  # metrics distinguish tiers by their names
                opened[-1].name += f"-{before + 1}"
        stack.pop_all()
    return opened


def _open(context: ConnectorContext) -> BlockStore:
    config = context.config
    built_in = BUILT_IN.get(config.kv_connector)
    make = built_in or _plug_in(config)
    try:
        store = make(context)
    except TroupeError:
        raise
    except Exception as error:  # a plug-in may raise anything
        raise ConfigError(f"the connector {config.kv_connector} cannot be opened: {error}", param=FIELD) from error
    if not isinstance(store, BlockStore):
        raise ConfigError(f"the connector {config.kv_connector} gave no BlockStore", param=FIELD)
    if built_in is None:
        store = PlugInStore(store, context.signature)
    store.name = config.kv_connector
    store.loads, store.stores = config.consumes, config.produces
    store.failure_policy = config.kv_load_failure_policy
    return store


def _plug_in(config: KVTransferConfig) -> MakeConnector:
    name = config.kv_connector
    if name in _OWN:
        raise ConfigError(
            f"{FIELD}.kv_connector: {name!r} is the name of a tier that is no connector", param=f"{FIELD}.kv_connector"
        )
    for point in entry_points(group=GROUP, name=name):
        try:
            make: MakeConnector = point.load()
        except Exception as error:  # a plug-in may raise anything
            raise ConfigError(f"the connector {name} cannot be loaded: {error}", param=FIELD) from error
        return make
    known = ", ".join(sorted({*BUILT_IN, *entry_points(group=GROUP).names} - {*_OWN}))
    hint = _FROM_VLLM.get(name, f"there are {known}, and plug-ins under the entry point group {GROUP}")
    raise ConfigError(f"{FIELD}.kv_connector: {name!r} is not there; {hint}", param=f"{FIELD}.kv_connector")
