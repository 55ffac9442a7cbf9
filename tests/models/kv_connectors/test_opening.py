"""Which connectors there are, and what becomes of one that cannot be opened."""

import socket
from collections.abc import Sequence
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.models.kv_connectors.conftest import BLOCK, FINGERPRINT
from troupellm.models.kv_connectors import open_connectors as opening
from troupellm.models.kv_connectors.base import ConnectorContext
from troupellm.models.kv_connectors.open_connectors import GROUP, open_connectors
from troupellm.models.kv_connectors.plugin import PlugInStore
from troupellm.models.kv_connectors.signed_block import HEADER_BYTES
from troupellm.models.kv_offload.store import BlockStore, StoreContext, StoreMiss
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError

CONTEXT = StoreContext(FINGERPRINT, BLOCK, 1.0)


class PluggedIn(BlockStore):
    """Keeps nothing; knows what it was made from."""

    def __init__(self, context: ConnectorContext) -> None:
        self.context = context

    def contains(self, keys: Sequence[bytes]) -> int:
        return 0

    def put(self, key: bytes, data: memoryview) -> None:
        pass

    def get(self, key: bytes, into: memoryview) -> None:
        raise StoreMiss

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


def broken(context: ConnectorContext) -> BlockStore:
    raise RuntimeError("no luck")


def nothing(context: ConnectorContext) -> object:
    return object()


def config(tmp_path: Path, *connectors: dict[str, Any], **settings: Any) -> EngineConfig:
    given = {"kv_transfer_config": list(connectors), "kv_offloading_size": "1MiB"}
    return EngineConfig.from_flat(given | {"prefix_hash_secret_file": str(tmp_path / "secret")} | settings)


@pytest.fixture
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, f"{__name__}:{value}", GROUP) for name, value in _PLUG_INS.items()]
    points += metadata.entry_points(group=GROUP)

    class Points(list[EntryPoint]):
        @property
        def names(self) -> set[str]:
            return {point.name for point in self}

    def entry_points(*, group: str, name: str | None = None) -> Points:
        assert group == GROUP
        return Points(point for point in points if name in (None, point.name))

    monkeypatch.setattr(opening, "entry_points", entry_points)


_PLUG_INS = {"mine": "PluggedIn", "broken": "broken", "nothing": "nothing", "missing": "not_there", "disk": "PluggedIn"}


def test_without_connectors_nothing_is_read(tmp_path: Path) -> None:
    assert open_connectors(EngineConfig(), CONTEXT) == []


def test_a_connector_with_the_name_of_a_tier_is_refused(tmp_path: Path, plug_ins: None) -> None:
    with pytest.raises(ConfigError, match="'disk' is the name of a tier"):
        open_connectors(config(tmp_path, {"kv_connector": "disk"}), CONTEXT)


def test_two_of_a_kind_have_names_of_their_own(tmp_path: Path) -> None:
    folders = [{"path": str(tmp_path / name)} for name in ("near", "far")]
    given = [{"kv_connector": "shared-directory", "kv_connector_extra_config": options} for options in folders]
    stores = open_connectors(config(tmp_path, *given), CONTEXT)
    assert [store.name for store in stores] == ["shared-directory", "shared-directory-2"]


def test_several_at_once_keep_their_order_roles_and_policies(tmp_path: Path, plug_ins: None) -> None:
    stores = open_connectors(
        config(
            tmp_path,
            {"kv_connector": "tcp-peer", "kv_role": "kv_producer", "kv_connector_extra_config": {"listen": 0}},
            {
                "kv_connector": "shared-directory",
                "kv_role": "kv_consumer",
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"path": str(tmp_path)},
            },
            {"kv_connector": "mine", "kv_connector_extra_config": {"any": 1}},
        ),
        CONTEXT,
    )
    told = [(store.name, store.loads, store.stores, store.failure_policy) for store in stores]
    assert told == [
        ("tcp-peer", False, True, "recompute"),
        ("shared-directory", True, False, "fail"),
        ("mine", True, True, "recompute"),
    ]
    assert isinstance(stores[2], PlugInStore)
    plugged_in = stores[2]._store
    assert isinstance(plugged_in, PluggedIn)
    assert plugged_in.context.config.kv_connector_extra_config == {"any": 1}
    assert plugged_in.context.store is CONTEXT
    assert plugged_in.context.frame_bytes == HEADER_BYTES + BLOCK
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unknown", "there are broken, mine, missing, nothing, shared-directory, tcp-peer"),
        ("OffloadingConnector", "kv_offloading_size"),
        ("NixlConnector", "tcp-peer"),
        ("MultiConnector", "list"),
        ("broken", "no luck"),
        ("nothing", "no BlockStore"),
        ("missing", "cannot be loaded"),
    ],
)
def test_what_cannot_be_opened_is_named_and_leaves_nothing_open(
    tmp_path: Path, plug_ins: None, name: str, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    first = {"kv_connector": "tcp-peer", "kv_role": "kv_producer", "kv_connector_extra_config": {"listen": port}}
    with pytest.raises(ConfigError, match=said) as raised:
        open_connectors(config(tmp_path, first, {"kv_connector": name}), CONTEXT)
    assert name in raised.value.message
    socket.create_server(("127.0.0.1", port)).close()


def test_a_plug_in_of_the_tree_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "entry_points", lambda **_: metadata.EntryPoints())
    with pytest.raises(ConfigError, match="install the package troupellm-tcp-peer"):
        open_connectors(config(tmp_path, {"kv_connector": "tcp-peer", "kv_role": "kv_producer"}), CONTEXT)


def test_a_secret_must_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_hash_secret_file"):
        open_connectors(config(tmp_path, {"kv_connector": "tcp-peer"}, prefix_hash_secret_file=None), CONTEXT)
