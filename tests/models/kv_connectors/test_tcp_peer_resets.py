"""A reset of blocks that another engine serves."""

from typing import Any

import pytest

from tests.models.kv_connectors.conftest import Open, content, key
from tests.models.kv_connectors.test_tcp_peer import NAME, TcpPeer, peer_of, producer, read
from troupellm.models.kv_offload.store import StoreError, StoreMiss

__all__ = ["producer"]


def test_a_reset_on_either_side_empties_the_shelf(connect: Open, producer: TcpPeer) -> None:
    consumer = connect(NAME, {"peers": [peer_of(producer)]}, "kv_consumer")
    assert consumer.contains([key(0), key(1)]) == 2
    assert read(consumer, 0) == content(0)  # what follows is read ahead
    consumer.reset()
    assert producer.use().blocks == consumer.contains([key(0)]) == 0
    with pytest.raises(StoreMiss):
        read(consumer, 1)
    producer.put(key(0), memoryview(content(0)))
    assert read(consumer, 0) == content(0)
    producer.reset()
    assert consumer.contains([key(0)]) == 0


def test_a_peer_that_was_away_is_reset_before_it_is_asked(
    connect: Open, producer: TcpPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = connect(NAME, {"peers": [peer_of(producer)]}, "kv_consumer")
    (client,) = consumer._clients
    reset = client.reset

    def away() -> None:
        raise StoreError("the peer cannot be reached")

    monkeypatch.setattr(client, "reset", away)
    consumer.reset()
    assert producer.use().blocks == 10
    with pytest.raises(StoreError):
        consumer.contains([key(0)])
    monkeypatch.setattr(client, "reset", reset)
    assert consumer.contains([key(0)]) == 0
    assert producer.use().blocks == 0
    producer.put(key(0), memoryview(content(0)))
    assert consumer.contains([key(0)]) == 1, "it was owed once"


def test_what_is_being_put_while_the_shelf_is_cleared_is_forgotten(
    producer: TcpPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_lru = producer._served
    assert block_lru is not None
    header = block_lru._signature.header

    def late(*what: Any) -> bytes:
        block_lru.clear()
        return header(*what)

    monkeypatch.setattr(block_lru._signature, "header", late)
    producer.put(key(20), memoryview(content(20)))
    assert producer.use().blocks == 0
