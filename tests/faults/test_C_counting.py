"""Row C6 of the fault table for what only counts: texts of any length, on threads that no prompt waits for."""

import threading
from functools import partial

import anyio
import pytest
from tokenizers import Encoding

from troupellm.actors.input.actor import INLINE_CHARACTERS
from troupellm.actors.input.long_texts import PARALLEL
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.server.host import counting
from troupellm.server.openai import completions
from troupellm.server.pooling import vectors
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.every_route import COUNTING, content_with
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.servers.serving import eventually, running_server

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
LONG = 2**18
"""Far beyond the context, which has 4,096 tokens."""
DEAR = {
    "one letter": "a" * LONG,
    "spaces": " " * LONG,
    "emoji joiners": "\U0001f468\u200d" * (LONG // 7),
    "combining": "e" + "\u0301" * (LONG // 2),
}
PROMPT = "a question that takes a thread " * 40
REST = 0.3
"""Seconds between two long answers of the canary. It shares its event loop with the server here: without a rest, the
loop takes a core for itself, and beside another busy process no other thread gets the interpreter lock."""
MARK = "count me "
TEXT = MARK * 200
assert min(len(PROMPT), len(TEXT)) > INLINE_CHARACTERS


@pytest.mark.parametrize("text", DEAR.values(), ids=DEAR)
async def test_C6_dear_texts_are_counted_whole_beside_long_prompts(tiny_engine, text):
    answers = {}
    async with (
        tiny_engine() as engine,
        under_attack(engine, canary_tokens=40, short_prompt=PROMPT, rest=REST) as attacked,
        anyio.create_task_group() as group,
    ):

        async def count(path: str) -> None:
            answers[path] = await attacked.client.post(path, content=content_with(path, text), headers=JSON)

        for path in COUNTING:
            group.start_soon(count, path)
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(COUNTING, 200)
    tokens, *counts = [answers[path].json() for path in COUNTING]
    assert tokens["count"] == len(tokens["tokens"]) == len(text.encode())
    assert all(count["input_tokens"] > tokens["count"] for count in counts)


class Held:
    """Tokenizing a text with the mark waits for the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.waiting = 0
        encode = Tokenizer._encoding

        def held(tokenizer: Tokenizer, text: str, **options: bool) -> Encoding:
            if MARK in text and not self.gate.is_set():
                self.waiting += 1
                assert self.gate.wait(60)
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(Tokenizer, "_encoding", held)
        monkeypatch.setattr(counting, "WAIT_SECONDS", 600.0)  # however slow the machine is


async def counts_while_a_prompt_is_answered(client, host, held: Held) -> None:
    statuses: list[int] = []

    async def ask(path: str, **more: str) -> None:
        answer = await client.post(path, content=content_with(path, TEXT, **more), headers=JSON)
        statuses.append(answer.status_code)

    asked = 2 * PARALLEL * len(COUNTING) + 1
    async with anyio.create_task_group() as group:
        for path in 2 * PARALLEL * COUNTING:
            group.start_soon(ask, path)
        group.start_soon(partial(ask, "/v1/responses", truncation="auto"))
        try:
            await eventually(lambda: host.counting.inside == asked and held.waiting == PARALLEL, 30)
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert host.counting.inside == asked
        finally:
            held.gate.set()
    assert statuses == [200] * asked
    assert held.waiting == PARALLEL


async def test_C6_counting_holds_no_thread_of_prompts(tiny_engine, monkeypatch):
    held = Held(monkeypatch)
    async with (
        tiny_engine() as engine,
        under_attack(engine, canary_tokens=40, short_prompt=PROMPT, rest=REST) as attacked,
    ):
        await counts_while_a_prompt_is_answered(attacked.client, attacked.served.host, held)


async def test_C6_counting_in_an_api_process_holds_no_thread_of_prompts(tiny_engine, monkeypatch):
    held = Held(monkeypatch)
    async with (
        tiny_engine() as engine,
        front_pair(engine) as pair,
        running_server(pair.remote) as served,
        served.client() as client,
    ):
        await counts_while_a_prompt_is_answered(client, served.host, held)


FULL = {"/tokenize": 429, "/v1/messages/count_tokens": 529, "/v1/responses/input_tokens": 503}
"""The status of a full line, as the clients of each API expect it."""


async def test_C6_a_full_line_is_refused_and_short_texts_pass_it(tiny_engine, monkeypatch):
    held = Held(monkeypatch)
    monkeypatch.setattr(counting, "MOST_WAITING", 0)
    async with (
        tiny_engine() as engine,
        under_attack(engine, canary_tokens=40, short_prompt=PROMPT, rest=REST) as attacked,
        anyio.create_task_group() as group,
    ):
        send = partial(attacked.client.post, headers=JSON)
        for _ in range(PARALLEL):
            group.start_soon(partial(send, "/tokenize", content=content_with("/tokenize", TEXT)))
        try:
            await eventually(lambda: held.waiting == PARALLEL, 30)
            for path in COUNTING:
                full = await send(path, content=content_with(path, TEXT))
                assert full.status_code == FULL[path], (path, full.text)
                assert int(full.headers["retry-after"]) > 0
                assert "wait for their tokens to be counted" in full.json()["error"]["message"]
            short = await send("/tokenize", content=content_with("/tokenize", "Hi"))
            assert short.status_code == 200, short.text
        finally:
            held.gate.set()


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
async def test_C6_long_lists_of_token_ids_are_looked_through_off_the_loop(tiny_engine, monkeypatch, path, field):
    threads: list[int] = []

    def noting(read, *given):
        threads.append(threading.get_ident())
        return read(*given)

    for module, name in ((completions, "completion_prompts"), (vectors, "prompts_of")):
        monkeypatch.setattr(module, name, partial(noting, getattr(module, name)))
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=40) as attacked:
        long = await attacked.client.post(path, json={"model": "tiny", field: [5] * LONG})
        mixed = await attacked.client.post(path, json={"model": "tiny", field: [*[5] * LONG, "a"]})
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert (mixed.json()["error"]["param"], "must not mix" in mixed.text) == (field, True)
    assert len([thread for thread in threads if thread != threading.get_ident()]) == 2
    assert threading.get_ident() in threads  # the canaries' short ones
