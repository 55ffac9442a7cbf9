"""Blocks from another engine over TCP, with everything that the other end and the network may do."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.models.kv_connectors.conftest import BLOCK, FINGERPRINT, SECRET, Open, content, key
from troupellm.models.hub.secret import derived_key
from troupellm.models.kv_connectors.signed_block import BlockSignature
from troupellm.models.kv_offload.store import StoreCorrupt, StoreError, StoreMiss
from troupellm.protocol.errors import ConfigError
from troupellm.tests.support.engines.inside import wires_of
from troupellm_tcp_peer import wire as tcp_wire
from troupellm_tcp_peer.connector import NAME, TcpPeer

HANDSHAKE = derived_key(SECRET, f"{NAME} handshake")
SEAL = BlockSignature(derived_key(SECRET, "sealed KV blocks"), FINGERPRINT, BLOCK)
Answer = Callable[[socket.socket, int, list[bytes]], None]


def read(store: TcpPeer, number: int) -> bytes:
    into = bytearray(BLOCK)
    store.get(key(number), memoryview(into))
    return bytes(into)


def peer_of(store: TcpPeer) -> str:
    assert store.server is not None
    return f"127.0.0.1:{store.server.address[1]}"


@pytest.fixture
def producer(connect: Open) -> TcpPeer:
    """An engine that serves ten blocks."""
    store: TcpPeer = connect(NAME, {"listen": 0}, "kv_producer")
    for number in range(10):
        store.put(key(number), memoryview(content(number)))
    return store


@pytest.fixture
def impostor() -> Iterator[Callable[..., str]]:
    """A peer that knows the secret and answers as it likes; one connection after the other."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(answer: Answer, *, key: bytes = HANDSHAKE, greeting: bytes | None = None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        said = greeting or tcp_wire.GREETING.pack(tcp_wire.MAGIC, tcp_wire.VERSION, bytes(32))
                        connection.sendall(said)
                        claim = _exactly(connection, tcp_wire.CLAIM.size)
                        _exactly(connection, tcp_wire.PROOF_BYTES)
                        proof = tcp_wire.proof(key, b"server", said, claim)
                        connection.sendall(tcp_wire.VERDICT.pack(tcp_wire.ACCEPTED, proof))
                        while True:
                            what, count, size = tcp_wire.read_question(_exactly(connection, tcp_wire.QUESTION.size))
                            answer(connection, what, tcp_wire.read_keys(_exactly(connection, size), count))
                    except (OSError, tcp_wire.WireError):
                        continue

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise tcp_wire.WireClosed("gone")
        data += piece
    return data


def test_blocks_come_as_they_were_put(connect: Open, producer: TcpPeer) -> None:
    consumer = connect(NAME, {"peers": [peer_of(producer)]}, "kv_consumer")
    consumer.probe()
    assert consumer.contains([key(number) for number in range(12)]) == 10
    assert consumer.contains([key(20), key(0)]) == 0
    assert [read(consumer, number) for number in range(10)] == [content(number) for number in range(10)]
    with pytest.raises(StoreMiss):
        read(consumer, 11)
    assert producer.server is not None
    assert producer.server.num_connections <= 2  # they are kept and used again


def test_many_threads_ask_at_once(connect: Open, producer: TcpPeer) -> None:
    consumer, wrong = connect(NAME, {"peers": peer_of(producer)}, "kv_consumer"), list[object]()

    def run(seed: int) -> None:
        try:
            for step in range(40):
                number = (seed + step) % 10
                if read(consumer, number) != content(number) or consumer.contains([key(number)]) != 1:
                    wrong.append(number)
        except Exception as error:  # shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_questions_may_be_asked_before_answers_were_read(producer: TcpPeer) -> None:
    assert producer.server is not None
    with socket.create_connection(producer.server.address, timeout=10) as connection:
        greeting = _exactly(connection, tcp_wire.GREETING.size)
        claim = tcp_wire.CLAIM.pack(tcp_wire.MAGIC, tcp_wire.VERSION, BLOCK, FINGERPRINT, bytes(32))
        connection.sendall(claim + tcp_wire.proof(HANDSHAKE, b"client", greeting, claim))
        _exactly(connection, tcp_wire.VERDICT.size)
        keys = [key(number) for number in (3, 99, 4)]
        connection.sendall(tcp_wire.question(tcp_wire.GET, keys) + tcp_wire.question(tcp_wire.CONTAINS, keys) * 3)
        for number in (3, None, 4):
            if number is None:
                assert _exactly(connection, 1) == b"\0"
                continue
            assert _exactly(connection, 1) == b"\1"
            header, data = _exactly(connection, SEAL.frame_bytes - BLOCK), _exactly(connection, BLOCK)
            SEAL.check(key(number), header, data)
            assert data == content(number)
        for _ in range(3):
            assert tcp_wire.COUNT.unpack(_exactly(connection, tcp_wire.COUNT.size)) == (1,)


def test_the_block_lru_is_bounded_and_keeps_what_is_used(connect: Open) -> None:
    store: TcpPeer = connect(NAME, {"listen": 0, "bytes": 4 * SEAL.frame_bytes}, "kv_producer")
    consumer = connect(NAME, {"peers": peer_of(store)}, "kv_consumer")
    for number in range(4):
        store.put(key(number), memoryview(content(number)))
    assert read(consumer, 0) == content(0)
    store.put(key(4), memoryview(content(4)))
    assert consumer.contains([key(0)]) == 1
    assert consumer.contains([key(1)]) == 0
    assert (store.use().blocks, store.use().evicted) == (4, 1)
    assert store.use().used_bytes == store.use().capacity_bytes == 4 * SEAL.frame_bytes


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"secret": b"s" * 32}, "another secret"),
        ({"fingerprint": b"n" * 32}, "another model"),
        ({"block_bytes": 2 * BLOCK}, "another model"),
    ],
)
def test_a_peer_with_another_secret_or_model_gets_nothing(
    connect: Open, producer: TcpPeer, other: dict[str, Any], said: str
) -> None:
    consumer = connect(NAME, {"peers": peer_of(producer)}, "kv_consumer", **other)
    for ask in (consumer.probe, lambda: consumer.contains([key(0)]), lambda: consumer.get(key(0), memoryview(b""))):
        with pytest.raises(StoreError, match=said):
            ask()


def test_an_impostor_that_does_not_know_the_secret_is_not_believed(connect: Open, impostor: Callable[..., str]) -> None:
    address = impostor(lambda connection, what, keys: connection.sendall(tcp_wire.COUNT.pack(len(keys))), key=b"x" * 32)
    with pytest.raises(StoreError, match="does not know the secret"):
        connect(NAME, {"peers": address}, "kv_consumer").contains([key(0)])


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40), b"TROUPEKP" + bytes(60)])
def test_another_protocol_is_refused(connect: Open, impostor: Callable[..., str], greeting: bytes) -> None:
    address = impostor(lambda *_: None, greeting=greeting[: tcp_wire.GREETING.size])
    with pytest.raises(StoreError, match="protocol"):
        connect(NAME, {"peers": address}, "kv_consumer").probe()


def _say(*parts: bytes) -> Answer:
    return lambda connection, what, keys: connection.sendall(b"".join(parts))


def test_a_lie_about_what_it_has_is_an_error(connect: Open, impostor: Callable[..., str]) -> None:
    consumer = connect(NAME, {"peers": impostor(_say(tcp_wire.COUNT.pack(3)))}, "kv_consumer")
    with pytest.raises(StoreError, match="more than it was asked"):
        consumer.contains([key(0), key(1)])


@pytest.mark.parametrize(
    "sent",
    [
        SEAL.header(key(1), content(1)) + content(1),  # another block
        SEAL.header(key(0), content(0)) + content(1),  # another content
        BlockSignature(b"x" * 32, FINGERPRINT, BLOCK).header(key(0), content(0)) + content(0),  # forged
        bytes(SEAL.frame_bytes),
    ],
)
def test_a_wrong_block_is_a_miss(connect: Open, impostor: Callable[..., str], sent: bytes) -> None:
    consumer = connect(NAME, {"peers": impostor(_say(b"\1", sent))}, "kv_consumer")
    with pytest.raises(StoreCorrupt):
        read(consumer, 0)


def test_garbage_instead_of_a_block_is_an_error(connect: Open, impostor: Callable[..., str]) -> None:
    with pytest.raises(StoreError, match="something else"):
        read(connect(NAME, {"peers": impostor(_say(b"\7"))}, "kv_consumer"), 0)


def test_a_peer_that_dies_in_the_middle_of_a_block_is_an_error(connect: Open, impostor: Callable[..., str]) -> None:
    def answer(connection: socket.socket, what: int, keys: list[bytes]) -> None:
        connection.sendall(b"\1" + (SEAL.header(key(0), content(0)) + content(0))[:2000])
        raise tcp_wire.WireClosed("dead")

    with pytest.raises(StoreError, match="closed"):
        read(connect(NAME, {"peers": impostor(answer)}, "kv_consumer"), 0)


def test_a_peer_that_says_nothing_is_given_up(connect: Open, impostor: Callable[..., str]) -> None:
    consumer = connect(NAME, {"peers": impostor(lambda *_: None)}, "kv_consumer", timeout=0.05)
    for ask in (lambda: consumer.contains([key(0)]), lambda: read(consumer, 0)):
        with pytest.raises(StoreError, match="slow|timed out"):
            ask()


def test_a_connection_that_was_closed_meanwhile_is_opened_again(connect: Open, producer: TcpPeer) -> None:
    consumer, server = connect(NAME, {"peers": peer_of(producer)}, "kv_consumer"), producer.server
    assert server is not None
    assert read(consumer, 0) == content(0)
    (connected,) = wires_of(server)
    connected.shut()
    assert read(consumer, 1) == content(1)


def test_a_peer_that_is_gone_is_an_error_and_comes_back(connect: Open, producer: TcpPeer) -> None:
    address = peer_of(producer)
    consumer = connect(NAME, {"peers": address}, "kv_consumer")
    consumer.probe()
    producer.close()
    for ask in (lambda: consumer.contains([key(0)]), lambda: read(consumer, 0), consumer.probe):
        with pytest.raises(StoreError, match=address):
            ask()
    again = connect(NAME, {"listen": address}, "kv_producer")
    again.put(key(0), memoryview(content(0)))
    consumer.probe()
    assert read(consumer, 0) == content(0)


def test_of_several_peers_the_one_that_has_it_is_asked(connect: Open, producer: TcpPeer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead = unused.getsockname()[1]
    other: TcpPeer = connect(NAME, {"listen": 0}, "kv_producer")
    for number in range(20):
        other.put(key(number), memoryview(content(number)))
    peers = [f"127.0.0.1:{dead}", peer_of(producer), peer_of(other)]
    consumer = connect(NAME, {"peers": peers}, "kv_consumer")
    consumer.probe()
    assert consumer.contains([key(number) for number in range(30)]) == 20
    assert [read(consumer, number) for number in range(20)] == [content(number) for number in range(20)]
    with pytest.raises(StoreMiss):
        read(consumer, 25)
    other.close()
    assert consumer.contains([key(number) for number in range(30)]) == 10
    assert read(consumer, 3) == content(3)


def test_connections_beyond_the_most_are_closed(connect: Open) -> None:
    store: TcpPeer = connect(NAME, {"listen": 0, "max_connections": 1}, "kv_producer")
    first = connect(NAME, {"peers": peer_of(store)}, "kv_consumer")
    first.probe()
    with pytest.raises(StoreError, match="too many|closed|reached"):
        connect(NAME, {"peers": peer_of(store)}, "kv_consumer").probe()
    assert first.contains([key(0)]) == 0


@pytest.mark.parametrize(
    "sent",
    [
        tcp_wire.QUESTION.pack(9, 1, 33),
        tcp_wire.QUESTION.pack(tcp_wire.GET, 0, 33),
        tcp_wire.QUESTION.pack(tcp_wire.GET, 1, 2**32 - 1),
        tcp_wire.QUESTION.pack(tcp_wire.GET, 65535, 33),
        tcp_wire.QUESTION.pack(tcp_wire.GET, 1, 2) + b"\0\0",
        tcp_wire.QUESTION.pack(tcp_wire.GET, 1, 2) + b"\x05a",
        tcp_wire.QUESTION.pack(tcp_wire.GET, 2, 2) + b"\x01a",
        b"\xff" * 64,
    ],
)
def test_a_question_that_is_none_ends_the_connection(producer: TcpPeer, sent: bytes) -> None:
    assert producer.server is not None
    with socket.create_connection(producer.server.address, timeout=10) as connection:
        greeting = _exactly(connection, tcp_wire.GREETING.size)
        claim = tcp_wire.CLAIM.pack(tcp_wire.MAGIC, tcp_wire.VERSION, BLOCK, FINGERPRINT, bytes(32))
        connection.sendall(claim + tcp_wire.proof(HANDSHAKE, b"client", greeting, claim))
        _exactly(connection, tcp_wire.VERDICT.size)
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):  # of what it did not read
            assert connection.recv(1) == b""


@pytest.mark.parametrize("cut", [0, 5, tcp_wire.CLAIM.size, tcp_wire.CLAIM.size + 31])
def test_a_peer_with_an_unfinished_greeting_is_disconnected(producer: TcpPeer, cut: int) -> None:
    assert producer.server is not None
    with socket.create_connection(producer.server.address, timeout=10) as connection:
        _exactly(connection, tcp_wire.GREETING.size)
        connection.sendall(bytes(cut))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_a_proof_cannot_be_used_again_or_the_other_way_round() -> None:
    greeting, claim = b"g" * tcp_wire.GREETING.size, b"c" * tcp_wire.CLAIM.size
    proofs = {
        tcp_wire.proof(HANDSHAKE, side, said, claim)
        for side in (b"client", b"server")
        for said in (greeting, b"h" * tcp_wire.GREETING.size)
    }
    assert len(proofs) == 4
    assert struct.calcsize("<8sHxx32s") == tcp_wire.GREETING.size


def test_closing_lets_go_of_who_waits(connect: Open, impostor: Callable[..., str]) -> None:
    asked = threading.Event()

    def answer(connection: socket.socket, what: int, keys: list[bytes]) -> None:
        asked.set()

    consumer, ended = connect(NAME, {"peers": impostor(answer)}, "kv_consumer", timeout=60.0), list[str]()

    def wait() -> None:
        try:
            consumer.contains([key(0)])
        except StoreError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    asked.wait(10)
    consumer.close()
    thread.join(10)
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("options", "role", "named"),
    [
        ({}, "kv_producer", "listen"),
        ({}, "kv_consumer", "peers"),
        ({"listen": 0}, "kv_both", "peers"),
        ({"listen": 0, "peers": ["a:1"]}, "kv_producer", "peers"),
        ({"listen": 0, "peers": ["a:1"]}, "kv_consumer", "listen"),
        ({"listen": "here"}, "kv_producer", "listen"),
        ({"listen": "127.0.0.1:70000"}, "kv_producer", "listen"),
        ({"peers": ["127.0.0.1:0"]}, "kv_consumer", "peers"),
        ({"peers": ["a:1"] * 17}, "kv_consumer", "peers"),
        ({"listen": 0, "bytes": 1}, "kv_producer", "bytes"),
        ({"listen": 0, "max_connections": 0}, "kv_producer", "max_connections"),
        ({"listen": 0, "port": 1}, "kv_producer", "port"),
    ],
)
def test_wrong_options_are_refused_by_name(connect: Open, options: dict[str, Any], role: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        connect(NAME, options, role)


def test_an_address_in_use_is_refused_by_name(connect: Open, producer: TcpPeer) -> None:
    with pytest.raises(ConfigError, match="cannot be listened at"):
        connect(NAME, {"listen": peer_of(producer)}, "kv_producer")
