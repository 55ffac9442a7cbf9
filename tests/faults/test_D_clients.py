"""Rows D1 and D3 of the fault table: readers that stall, clients that leave."""

import socket
import threading

import anyio
import pytest

from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.tests.support.servers.canary import resident_bytes, under_attack
from troupellm.tests.support.servers.serving import eventually, http_request, server_config

pytestmark = pytest.mark.anyio

ENDLESS = {"model": "tiny", "prompt": "Once", "max_tokens": 3900, "temperature": 0, "ignore_eos": True}
MEBIBYTE = 2**20
ENCODE = Tokenizer.encode


async def stalled_reader(port: int, *, wordy: bool) -> socket.socket:
    """A client with a small receive buffer that never reads; wordy answers fill it sooner."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    await anyio.to_thread.run_sync(_connect, plain, port)
    await anyio.wait_writable(plain)
    fields = {"stream": True, "logprobs": 20 if wordy else None}
    plain.send(http_request("/v1/completions", ENDLESS | fields))
    return plain


def _connect(plain: socket.socket, port: int) -> None:
    plain.setblocking(True)
    plain.connect(("127.0.0.1", port))
    plain.setblocking(False)


async def paused_readers(engine, port: int, readers: int) -> list[socket.socket]:
    """Stalled readers whose sequences have been paused (with 500, at least 16 of them at one time)."""
    stalled = [await stalled_reader(port, wordy=readers <= 16) for _ in range(readers)]
    seen_paused = 0

    def all_paused() -> bool:
        nonlocal seen_paused
        seen_paused = max(seen_paused, engine.snapshot().scheduler.paused)
        return seen_paused >= min(readers, 16)

    await eventually(all_paused, 120)
    return stalled


BUDGET_TOKENS = 64
TRANSPORT = 8 * 64 * 1024
"""Bytes: a send waits once asyncio's transport holds 64 KiB, its high-water mark. Filled with pieces of 300 bytes that
costs, with the objects around every piece, some 0.5 MiB by measurement. The kernel's send buffer (`sse_send_buffer`)
is bounded too, and not this process's memory."""
TOKEN = {True: 4 * 1024, False: 512}
"""Bytes of an undelivered token with (True) and without 20 log-probabilities: in the outbox, or encoded and waiting."""
SLACK = 8 * MEBIBYTE
"""The canaries' clients, and what malloc keeps."""
STEP_ROW = MEBIBYTE
"""Bytes that the first steps of a batch allocate for each row (at most `max_num_seqs`), and reuse from then on."""


def most_resident(readers: int, kv_bytes: int, *, warm: bool) -> int:
    """Bytes: the KV cache, which is reserved at start and touched now, and per reader its transport and its outbox,
    which holds the budget of tokens and what two steps in flight add."""
    reader = TRANSPORT + (BUDGET_TOKENS + 2) * TOKEN[readers <= 16]
    return kv_bytes + SLACK + readers * reader + (0 if warm else min(readers, 256) * STEP_ROW)


@pytest.mark.parametrize(
    "readers",
    [
        pytest.param(1, marks=pytest.mark.slow),
        16,
        pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
async def test_D1_stalled_readers_pause_alone_and_are_cut(tiny_engine, readers):
    config = server_config(write_timeout=3.0 if readers <= 16 else 30.0)
    kv_bytes = max(16, readers // 4) * MEBIBYTE
    settings = {"stream_budget_tokens": BUDGET_TOKENS, "kv_cache_memory_bytes": kv_bytes}
    async with tiny_engine(**settings) as engine, under_attack(engine, config, canary_tokens=100) as attacked:

        def let_go() -> bool:
            return engine.snapshot().scheduler.paused == 0 and len(attacked.served.host.in_flight) < 3

        warm = readers <= 16
        if warm:
            for plain in await paused_readers(engine, attacked.served.port, readers):
                plain.close()
            await eventually(let_go)
        generated, before = engine.snapshot().scheduler.tokens_generated, resident_bytes()
        stalled = await paused_readers(engine, attacked.served.port, readers)
        try:
            assert engine.snapshot().scheduler.tokens_generated - generated < readers * 1000 + 20_000
            assert resident_bytes() - before < most_resident(readers, kv_bytes, warm=warm)
            await eventually(let_go, 240)
        finally:
            for plain in stalled:
                plain.close()


async def test_D3_leaving_before_the_body_is_complete(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            connection = await attacked.served.raw(http_request(path, b'{"prompt": "On', content_length="1000"))
            await connection.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_D3_a_client_that_leaves_the_queue_frees_its_place(tiny_engine, stream):
    async with tiny_engine(max_num_seqs=1) as engine, under_attack(engine, canary_tokens=40) as attacked:
        for _ in range(3):
            body = ENDLESS | {"max_tokens": 500}
            first = await attacked.served.raw(http_request("/v1/completions", body | {"stream": True}))
            queued = await attacked.served.raw(http_request("/v1/completions", body | {"stream": stream}))
            await eventually(lambda: engine.snapshot().scheduler.waiting > 0)
            await queued.close()
            await first.close()


class Gate:
    """Holds the tokenizing of the attack's prompts, which begin with an x, in its thread."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.waiting = 0

    def encode(self, tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
        if text.startswith("x"):
            self.waiting += 1
            assert self.go.acquire(timeout=30)
            self.waiting -= 1
        return ENCODE(tokenizer, text, **options)


@pytest.mark.parametrize("stream", [True, False])
async def test_D3_a_client_that_leaves_while_it_is_tokenized_costs_nothing(tiny_engine, monkeypatch, stream):
    gate = Gate()
    monkeypatch.setattr(
        Tokenizer, "encode", lambda tokenizer, *given, **options: gate.encode(tokenizer, *given, **options)
    )
    body = ENDLESS | {"prompt": "x" * 3000, "stream": stream}
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=40) as attacked:
        for _ in range(3):
            connection = await attacked.served.raw(http_request("/v1/completions", body))
            await eventually(lambda: gate.waiting == 1)
            await connection.close()
            await eventually(lambda: _gone(attacked))
            gate.go.release()
            await eventually(lambda: gate.waiting == 0 and not _gone(attacked))


def _gone(attacked) -> bool:
    """An exchange whose client left is still there."""
    return any(exchange.gone for exchange in attacked.served.host.in_flight)


@pytest.mark.parametrize("stream", [True, False])
async def test_D3_a_client_that_leaves_at_once_costs_nothing(tiny_engine, stream):
    """Lands wherever it does, mostly before tokenizing: nothing is awaited."""
    body = ENDLESS | {"prompt": "x" * 3000, "stream": stream}
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for _ in range(10):
            connection = await attacked.served.raw(http_request("/v1/completions", body))
            await connection.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_D3_a_client_that_leaves_during_prefill_frees_its_blocks(tiny_engine, stream):
    body = ENDLESS | {"prompt": [7] * 3900, "max_tokens": 10, "stream": stream}
    settings = {"max_num_batched_tokens": 32, "enable_prefix_caching": False}
    async with tiny_engine(**settings) as engine, under_attack(engine, canary_tokens=40) as attacked:
        for _ in range(3):
            steps = engine.snapshot().scheduler.steps
            connection = await attacked.served.raw(http_request("/v1/completions", body))
            await eventually(lambda before=steps: engine.snapshot().scheduler.steps > before + 3)
            await connection.close()


@pytest.mark.parametrize("n", [1, 4])
async def test_D3_a_client_that_leaves_during_decode_frees_its_blocks(tiny_engine, n):
    body = ENDLESS | {"n": n, "stream": True}
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for _ in range(3):
            connection = await attacked.served.raw(http_request("/v1/completions", body))
            await connection.read_until(b"data: ")
            await connection.close()


async def test_D3_leaving_around_the_last_token(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for tokens in range(1, 9):
            body = ENDLESS | {"max_tokens": tokens, "stream": True}
            connection = await attacked.served.raw(http_request("/v1/completions", body))
            await connection.read_until(b"data: ")
            await connection.close()


async def test_D3_an_aborted_request_is_gone_within_a_second(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=40) as attacked:
        connection = await attacked.served.raw(http_request("/v1/completions", ENDLESS | {"n": 8, "stream": True}))
        await eventually(lambda: engine.snapshot().scheduler.running >= 8)
        await connection.close()
        await eventually(lambda: engine.snapshot().scheduler.running <= 2, 1.0)
