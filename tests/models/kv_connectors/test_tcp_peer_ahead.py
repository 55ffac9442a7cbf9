"""Blocks that are asked for ahead of their turn: few questions, any order of reading, and nothing left behind."""

import random
import threading

import pytest

from tests.models.kv_connectors.conftest import BLOCK, Open, content, key
from troupellm.models.kv_connectors import tcp_client, tcp_server, tcp_wire
from troupellm.models.kv_connectors.tcp_client import AHEAD, MOST_IDLE, MOST_RUNS
from troupellm.models.kv_connectors.tcp_peer import NAME, TcpPeer
from troupellm.models.kv_offload.store import StoreMiss

COUNT = 40
KEYS = [key(number) for number in range(COUNT)]


@pytest.fixture
def producer(connect: Open) -> TcpPeer:
    store: TcpPeer = connect(NAME, {"listen": 0}, "kv_producer")
    for number in range(COUNT):
        store.put(KEYS[number], memoryview(content(number)))
    return store


@pytest.fixture
def consumer(connect: Open, producer: TcpPeer) -> TcpPeer:
    assert producer.server is not None
    store: TcpPeer = connect(NAME, {"peers": [f"127.0.0.1:{producer.server.address[1]}"]}, "kv_consumer")
    assert store.contains(KEYS) == COUNT
    return store


def read(store: TcpPeer, number: int) -> bytes:
    into = bytearray(BLOCK)
    store.get(key(number), memoryview(into))
    return bytes(into)


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each question was for, from now on."""
    counts: list[int] = []
    real = tcp_wire.read_question

    def listening(head: bytes) -> tuple[int, int, int]:
        what, count, size = real(head)
        if what == tcp_wire.GET:
            counts.append(count)
        return what, count, size

    monkeypatch.setattr(tcp_server.tcp_wire, "read_question", listening)
    return counts


def test_one_question_for_several_blocks_in_order(consumer: TcpPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = asked(monkeypatch)
    assert [read(consumer, number) for number in range(COUNT)] == [content(number) for number in range(COUNT)]
    assert counts == [AHEAD] * (COUNT // AHEAD)


def test_a_second_reading_asks_again(consumer: TcpPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        for number in range(COUNT):
            assert read(consumer, number) == content(number)
    (peer,) = consumer._clients
    assert not peer._runs
    assert not peer._run_of
    assert not peer._busy


@pytest.mark.parametrize("seed", range(4))
def test_any_order_in_any_thread(consumer: TcpPeer, producer: TcpPeer, seed: int) -> None:
    numbers, wrong = list(range(COUNT)) * 3, list[object]()
    random.Random(seed).shuffle(numbers)

    def run(part: int) -> None:
        try:
            wrong.extend(number for number in numbers[part::4] if read(consumer, number) != content(number))
        except Exception as error:  # shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    (peer,) = consumer._clients
    assert len(peer._runs) <= MOST_RUNS
    assert len(peer._idle) <= MOST_IDLE
    held = {run.connected for run in peer._runs if run.connected is not None}
    assert peer._busy == held
    assert set(peer._run_of.values()) <= set(peer._runs)


def test_what_nobody_reads_on_gives_way(consumer: TcpPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_client, "MOST_RUNS", 2)
    for number in range(0, COUNT, AHEAD):
        assert read(consumer, number) == content(number)
    (peer,) = consumer._clients
    assert len(peer._runs) == 2
    assert [read(consumer, number) for number in range(COUNT)] == [content(number) for number in range(COUNT)]


def test_a_connection_that_ends_meanwhile_costs_another_question(consumer: TcpPeer, producer: TcpPeer) -> None:
    assert read(consumer, 0) == content(0)
    assert producer.server is not None
    for connected in list(producer.server._wires):
        connected.shut()
    assert [read(consumer, number) for number in range(1, COUNT)] == [content(number) for number in range(1, COUNT)]


def test_a_block_that_has_gone_meanwhile_is_a_miss_and_the_next_ones_come(consumer: TcpPeer, producer: TcpPeer) -> None:
    assert producer._served is not None
    del producer._served._blocks[key(2)]
    assert read(consumer, 1) == content(1)
    with pytest.raises(StoreMiss):
        read(consumer, 2)
    assert read(consumer, 3) == content(3)
