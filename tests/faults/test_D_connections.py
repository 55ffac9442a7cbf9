"""Rows D2, D4, D5 of the fault table and the bound of D3: slow readers, storms, half-closed and reused connections."""

import json
import re

import anyio
import pytest

from troupellm.actors.output.outbox import LocalOutbox
from troupellm.protocol.messages.scheduler import SubmitRequest
from troupellm.tests.support.clients.sockets import RawSocket, raw_socket
from troupellm.tests.support.engines.inside import system_of
from troupellm.tests.support.servers.canary import LONG_TOKENS, beside_canaries, under_attack
from troupellm.tests.support.servers.processes import ON_A_THREAD, ready_process
from troupellm.tests.support.servers.serving import eventually, http_request, server_config

pytestmark = pytest.mark.anyio

ENDLESS = {"model": "tiny", "prompt": "Once", "max_tokens": 3900, "temperature": 0, "ignore_eos": True}
CAPACITY_BACK_SECONDS = 60.0
"""Tells a server that is stuck from one on a busy machine."""
SHORT = ENDLESS | {"max_tokens": 3}
STREAM = http_request("/v1/completions", ENDLESS | {"stream": True})
WORDY = http_request("/v1/completions", ENDLESS | {"stream": True, "logprobs": 20})


async def test_D2_a_reader_of_a_byte_per_second_is_cut_and_slows_nobody(tiny_engine):
    settings = {"stream_budget_tokens": 64}
    config = server_config(write_timeout=2.5)
    async with tiny_engine(**settings) as engine, under_attack(engine, config) as attacked:
        with await raw_socket(attacked.served.port, WORDY, receive_buffer=4096) as slow:
            await slow.read_until(b"data: ")
            await eventually(lambda: engine.snapshot().scheduler.paused == 1)
            generated, answered = engine.snapshot().scheduler.tokens_generated, attacked.answered["long"]
            with anyio.fail_after(30):
                while engine.snapshot().scheduler.paused:
                    await slow.read(1)
                    await attacked.more_short_answers()
            others = (attacked.answered["long"] + 1 - answered) * LONG_TOKENS + attacked.answered["short"] * 4
            assert engine.snapshot().scheduler.tokens_generated - generated <= others + 2 * 64
            assert attacked.answered["long"] > answered


async def test_D3_an_abort_takes_effect_within_one_step(tiny_engine, monkeypatch):
    """No plan that is made after the client's end was noticed names its sequences. That its end is told without waiting
    for the plans in flight is a test of the scheduler's."""
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        system = system_of(engine)
        rows: dict[int, set[int]] = {}
        gone: set[int] = set()
        late: list[int] = []
        ended: list[int] = []
        abort, end = LocalOutbox.abort, LocalOutbox._end
        submit, offer = system.scheduler.put, system.worker.offer

        async def noting_submit(message):
            if isinstance(message, SubmitRequest):
                rows[message.request] = {spec.row for spec in message.sequences}
            await submit(message)

        def noting_plan(plan):
            late.extend(request for request in gone if not rows[request].isdisjoint(plan.rows))
            return offer(plan)

        def noting_abort(outbox: LocalOutbox) -> None:
            if not (outbox.terminal or outbox.cancelled):
                gone.add(outbox.request)
            abort(outbox)

        def noting_end(outbox: LocalOutbox) -> None:
            if outbox.request in gone:
                ended.append(outbox.request)
            end(outbox)

        system.scheduler.put, system.worker.offer = noting_submit, noting_plan
        monkeypatch.setattr(LocalOutbox, "abort", noting_abort)
        monkeypatch.setattr(LocalOutbox, "_end", noting_end)
        for n in (1, 4, 8):
            body = http_request("/v1/completions", ENDLESS | {"n": n, "stream": True})
            for _ in range(4):
                with await raw_socket(attacked.served.port, body) as reader:
                    await reader.read_until(b"data: ")
                await eventually(lambda: not attacked.engine.snapshot().scheduler.paused)
        await eventually(lambda: len(ended) == 12)
        del system.scheduler.put, system.worker.offer
    assert late == []


async def storm(port: int, connections: int, per_second: float) -> None:
    """Connect, send a request, close; open loop as far as this machine keeps up."""
    async with anyio.create_task_group() as group:
        due = anyio.current_time()
        for _ in range(connections):
            group.start_soon(_hit, port)
            due += 1 / per_second
            await anyio.sleep_until(due)


async def _hit(port: int) -> None:
    with await raw_socket(port, STREAM):
        return


@pytest.mark.parametrize(
    ("connections", "per_second", "flags"),
    [(100, 500, ON_A_THREAD), pytest.param(10_000, 500, (), marks=pytest.mark.slow)],
)
async def test_D4_a_storm_of_clients_that_leave_at_once_costs_nothing(checkpoint, connections, per_second, flags):
    async with ready_process(checkpoint, *flags) as server, beside_canaries(server) as canaries:
        before = await server.metric("troupellm_generation_tokens_total")
        sung = _sung(canaries)
        await storm(server.port, connections, per_second)
        with anyio.fail_after(CAPACITY_BACK_SECONDS):
            while await server.metric("troupellm_requests_running") > 2:  # noqa: ASYNC110 - another process's state
                await anyio.sleep(0.02)
        print(f"{connections} came, {await server.metric('troupellm_cancelled_total'):.0f} were let in")
        # Many have left before they are let in; those who have not are cancelled. All are known to have left.
        async with server.client() as client:
            counted = re.findall(
                r'troupellm_http_requests_total\{.*status="499"\} (\S+)', (await client.get("/metrics")).text
            )
        assert sum(map(float, counted)) >= 0.9 * connections
        wasted = await server.metric("troupellm_generation_tokens_total") - before - (_sung(canaries) - sung)
        assert wasted < 0.01 * connections * ENDLESS["max_tokens"]


def _sung(canaries) -> int:
    return canaries.answered["long"] * LONG_TOKENS + canaries.answered["short"] * 4


async def test_D5_half_closing_means_leaving(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for stream in (True, False):
            body = http_request("/v1/completions", ENDLESS | {"stream": stream})
            with await raw_socket(attacked.served.port, body) as half:
                await eventually(lambda: len(attacked.served.host.in_flight) > 2)
                half.shut_down_sending()
                await half.read_all()
            assert b"[DONE]" not in half.seen
            assert b'"finish_reason":"length"' not in half.seen
        text = (await engine.metrics(compat=False)).decode()
        cancelled = re.search(r"troupellm_cancelled_total{.*by=\"client\".*} (\S+)", text)
        assert cancelled is not None
        assert float(cancelled[1]) == 2


async def test_D5_pipelined_requests_are_answered_in_order_and_unmixed(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=40) as attacked:
        lengths = (7, 3, 5, 1)
        requests = [
            http_request("/v1/completions", SHORT | {"max_tokens": tokens, "stream": stream}, x_request_id=f"r{tokens}")
            for tokens, stream in zip(lengths, (False, True, False, True), strict=True)
        ]
        with await raw_socket(attacked.served.port, b"".join(requests)) as pipelined:
            for tokens, stream in zip(lengths, (False, True, False, True), strict=True):
                status, headers, body = await response_of(pipelined)
                assert (status, headers[b"x-request-id"]) == (200, f"r{tokens}".encode())
                if stream:
                    assert body.endswith(b"data: [DONE]\n\n")
                else:
                    assert json.loads(body)["usage"]["completion_tokens"] == tokens


async def test_D5_a_connection_is_reused_after_an_error(tiny_engine):
    config = server_config(max_body_bytes=4096)
    good = http_request("/v1/completions", SHORT)
    async with tiny_engine() as engine, under_attack(engine, config, canary_tokens=40) as attacked:
        with await raw_socket(attacked.served.port) as connection:
            for bad, code in (
                (http_request("/v1/completions", b"{"), b"invalid_json"),
                (http_request("/v1/completions", SHORT | {"n": 0}), b"integer_below_min_value"),
                (http_request("/v1/completions", SHORT | {"model": "other"}), b"model_not_found"),
                (http_request("/v1/nothing", SHORT), b"unknown_url"),
            ):
                await connection.send(bad)
                status, _, body = await response_of(connection)
                assert 400 <= status < 500
                assert code in body
                await connection.send(good)
                status, _, body = await response_of(connection)
                assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3)
            # An unread body is not taken for the next request: the connection ends with the answer.
            await connection.send(http_request("/v1/completions", good * 20, content_length="5000"))
            status, headers, _ = await response_of(connection)
            assert (status, headers[b"connection"]) == (413, b"close")
            assert not await connection.read_all()


async def response_of(connection: RawSocket) -> tuple[int, dict[bytes, bytes], bytes]:
    """The next response; what follows it stays in `seen`."""
    await connection.read_until(b"\r\n\r\n")
    head, _, connection.seen = connection.seen.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines[1:])}
    if b"content-length" in headers:
        length = int(headers[b"content-length"])
        while len(connection.seen) < length:
            assert await connection.read()
        body, connection.seen = connection.seen[:length], connection.seen[length:]
        return int(lines[0].split()[1]), headers, body
    body = b""
    while True:
        await connection.read_until(b"\r\n")
        size, _, connection.seen = connection.seen.partition(b"\r\n")
        length = int(size, 16)
        while len(connection.seen) < length + 2:
            assert await connection.read()
        body, connection.seen = body + connection.seen[:length], connection.seen[length + 2 :]
        if length == 0:
            return int(lines[0].split()[1]), headers, body
