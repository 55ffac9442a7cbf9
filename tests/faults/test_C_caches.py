"""Rows C5 and C6 of the fault table: what thousands of strangers leave behind, and texts that are dear to prepare."""

import json
import sys
from itertools import chain

import anyio
import pytest
from canary import resident_bytes, under_attack
from every_route import COUNTING, SAMPLES, STORING, content_with, takes_text
from oracle import Oracle, make_core, ready, submission
from serving import eventually

from troupellm.actors.guide.cache import GuideCache, key_of
from troupellm.actors.scheduler.fair_share import _MOST_REMEMBERED
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import GuideProgram, GuideSpec

pytestmark = pytest.mark.anyio

MEBIBYTE = 2**20
STRANGERS = 10_000
LONG = 7 * MEBIBYTE


def test_C5_ten_thousand_salts_and_tenants_leave_a_bounded_trace():
    """Each computes a prompt of its own once and is never seen again."""
    settings = ready(num_blocks=64, block_size=4, max_model_len=32)
    core, oracle = make_core(settings, max_num_seqs=8), Oracle(4, 64)
    closed, now = 0, 0.0
    for stranger in range(STRANGERS):
        salt = str(stranger).encode()
        core.submit(
            submission(stranger, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1, cache_salt=salt, tenant=f"t{stranger}")
        )
        while (plan := core.plan(now := now + 1.0)) is not None:
            oracle.launch(plan)
        output = core.update(oracle.collect(), now)
        closed += len(output.closed)
    core.assert_invariants()
    snapshot = core.snapshot()
    assert (closed, snapshot.prefix_hits) == (STRANGERS, 0)
    assert snapshot.prefix_evictions >= 2 * STRANGERS - 64
    pool = core._tables.pool
    assert len(pool._block_of) <= 64
    assert len(pool._branches._blocks) <= 64
    assert len(core._running_set._fair_share._served) <= _MOST_REMEMBERED + 1
    assert len(oracle.rows) <= 8


async def test_C5_salts_over_http_change_neither_the_cache_s_size_nor_the_memory(tiny_engine):
    async with tiny_engine(num_gpu_blocks_override=264) as engine, under_attack(engine, canary_tokens=40) as attacked:

        async def strangers(first: int, count: int) -> None:
            for number in range(first, first + count):
                body = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 1, "cache_salt": f"salt {number}"}
                answer = await attacked.client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

        async def crowd(first: int) -> None:
            async with anyio.create_task_group() as group:
                for part in range(8):
                    group.start_soon(strangers, first + 8 * part, 8)

        await crowd(0)
        evicted, before = engine.snapshot().scheduler.prefix_evictions, resident_bytes()
        await crowd(1000)
        snapshot = engine.snapshot().scheduler
        assert snapshot.prefix_evictions > evicted
        assert resident_bytes() - before < 8 * MEBIBYTE
        text = (await attacked.client.get("/metrics")).text
        assert "troupellm_prefix_cache_evictions_total{" in text


def test_C5_ten_thousand_schemas_are_kept_within_their_bytes_and_evictions_are_counted():
    capacity = MEBIBYTE
    cache = GuideCache(capacity)
    for number in range(STRANGERS):
        schema = json.dumps({"type": "object", "properties": {f"field {number}": {"type": "string"}}})
        key = key_of(GuideSpec(kind="json_schema", source=schema), "llguidance")
        if number % 3:
            cache.keep(key, GuideProgram(backend="llguidance", text=schema))
        else:
            cache.keep_refusal(key, "this schema is refused")
        assert cache.num_bytes <= 1.25 * capacity
    assert 0 < len(cache) < STRANGERS
    assert cache.evicted == STRANGERS - len(cache)


@pytest.mark.parametrize(
    "spec",
    [
        GuideSpec(kind="json_object", whitespace_pattern="x" * 200_000),
        GuideSpec(kind="regex", source="\U0001f468" + "x" * 200_000),
    ],
    ids=["white space", "one wide letter"],
)
def test_C5_a_guide_is_kept_with_all_that_its_texts_take(spec):
    """Else refusals of such guides fill the memory as long as anybody sends new ones."""
    cache = GuideCache(16 * MEBIBYTE)
    key = key_of(spec, "llguidance")
    taken = sum(map(sys.getsizeof, (spec.source, spec.whitespace_pattern)))
    cache.keep_refusal(key, "it is refused")
    assert taken <= cache.num_bytes < taken + 1000
    cache.keep(key, GuideProgram(backend="llguidance", text="program"))
    assert 2 * taken <= cache.num_bytes < 2 * taken + 2000


DEAR = {
    "one letter": "a" * LONG,
    "spaces": " " * LONG,
    "emoji joiners": "\U0001f468\u200d" * (LONG // 7),
    "combining": "e" + "\u0301" * (LONG // 2),
}


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=name, marks=pytest.mark.slow if name == "combining" else ()) for name, text in DEAR.items()],
)
async def test_C6_texts_that_are_dear_to_prepare_are_refused_off_the_loop(tiny_engine, monkeypatch, text):
    """Seven mebibytes into a context of 4,096 tokens: refused by name, and no thread reads more than could ever fit."""
    content = [
        ("/v1/completions", content_with("/v1/completions", text)),
        ("/v1/completions", content_with("/v1/completions", text, prompt=["a", "Hi"], stream=True)),
        ("/v1/chat/completions", content_with("/v1/chat/completions", text)),
        ("/v1/responses", content_with("/v1/responses", text, truncation="auto")),
    ]
    await refuses(tiny_engine, monkeypatch, content)


@pytest.mark.slow
@pytest.mark.parametrize("text", DEAR.values(), ids=DEAR)
async def test_C6_so_are_they_on_every_route_that_does_not_only_count(tiny_engine, monkeypatch, text):
    paths = [path for path in SAMPLES if takes_text(path) and path not in (*COUNTING, *STORING)]
    assert len(paths) > 8
    await refuses(tiny_engine, monkeypatch, [(path, content_with(path, text)) for path in paths])


async def refuses(tiny_engine, monkeypatch, requests):
    longest = [0]
    encode = Tokenizer.encode

    def noting(tokenizer: Tokenizer, prompt: str, **options: bool) -> list[int]:
        longest[0] = max(longest[0], len(prompt))
        return encode(tokenizer, prompt, **options)

    async with tiny_engine() as engine, under_attack(engine, canary_tokens=40, rest=0.3) as attacked:
        monkeypatch.setattr(Tokenizer, "encode", noting)
        for path, content in requests:
            answer = await attacked.client.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (path, answer.text)
            reason = "does not support" if path == "/classify" else "maximum context length is 4096 tokens"
            assert reason in answer.json()["error"]["message"], path
        await eventually(lambda: not list(chain(engine._running.system.requests)))
    assert longest[0] < MEBIBYTE


@pytest.mark.parametrize("field", ["stop", "bad_words"])
async def test_C6_lists_of_words_are_bounded(tiny_engine, field):
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=40) as attacked:
        for words in (["a" * MEBIBYTE], ["a"] * 200_000):
            body = {"model": "tiny", "prompt": "a", field: words}
            answer = await attacked.client.post("/v1/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == field
