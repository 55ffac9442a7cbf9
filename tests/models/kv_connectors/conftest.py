"""Connectors without an engine: blocks of a few bytes, two engines' sides of a shared secret."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from troupellm.models.kv_connectors.base import ConnectorContext
from troupellm.models.kv_connectors.open_connectors import find_connector
from troupellm.models.kv_offload.store import BlockStore, StoreContext
from troupellm.protocol.config.kv_connectors import read_transfer_configs

BLOCK = 4096
SECRET, FINGERPRINT = bytes(range(32)), b"m" * 32

Open = Callable[..., Any]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return bytes((number + place) % 251 for place in range(BLOCK))


@pytest.fixture
def connect() -> Iterator[Open]:
    """Opens connectors, as another engine or model if asked to, and closes them."""
    opened: list[BlockStore] = []

    def open_one(
        name: str,
        options: dict[str, Any],
        role: str = "kv_both",
        *,
        secret: bytes = SECRET,
        fingerprint: bytes = FINGERPRINT,
        block_bytes: int = BLOCK,
        timeout: float = 5.0,
    ) -> BlockStore:
        (config,) = read_transfer_configs({"kv_connector": name, "kv_role": role, "kv_connector_extra_config": options})
        store = StoreContext(fingerprint, block_bytes, timeout)
        opened.append(find_connector(config)(ConnectorContext(config, store, secret)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()
