"""Vectors, scores and labels through the whole engine, with small real models on worker threads and in processes."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from troupellm import LLM, Engine, PoolingParams
from troupellm.protocol.config.engine import TenantConfig
from troupellm.protocol.errors import ContextLengthExceeded, EngineOverloaded, InvalidRequest, RateLimited
from troupellm.protocol.messages.input import PairPrompt, TextPrompt, TokensPrompt, Truncation
from troupellm.protocol.wire.api_process import Ended, Submit
from troupellm.tests.support.checkpoints import tiny_encoder
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.servers.serving import eventually, with_spare
from troupellm.tests.support.workers.meddler import WorkerHosts

pytestmark = pytest.mark.anyio

TEXTS = ["a fox", "the quick brown fox jumps over the dog", "a", "x y z", "0123456789 " * 6, "a fox", "hello, you"]
IDS = [[number % 200 + 1 for number in range(start, start + length)] for start, length in enumerate((1, 5, 40, 130, 7))]
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pooling")
    write_tiny_model(root / "decoder")
    tiny_encoder.write_encoder(root / "encoder", tiny_encoder.bert, pooling="mean_tokens")
    tiny_encoder.write_encoder(root / "cross", lambda: tiny_encoder.bert(1))
    tiny_encoder.write_encoder(root / "classes", lambda: tiny_encoder.roberta(3))
    return {name: root / name for name in ("decoder", "encoder", "cross", "classes")}


@pytest.fixture
def engine_for(folders: dict[str, Path]) -> Callable[..., Engine]:
    def make(name: str, **settings: Any) -> Engine:
        kept = dict(SETTINGS)
        if name != "decoder":
            del kept["kv_cache_memory_bytes"]
        return Engine(folders[name], **(kept | settings))

    return make


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def idle(engine: Engine) -> bool:
    snapshot = engine.snapshot()
    scheduler = snapshot.scheduler
    return not (scheduler.running or scheduler.waiting or scheduler.blocks_used or snapshot.open_requests)


async def test_embeddings_are_what_sentence_transformers_makes_of_the_text(
    engine_for: Any, folders: dict[str, Path]
) -> None:
    reference = tiny_encoder.write_encoder(folders["encoder"], tiny_encoder.bert, pooling="mean_tokens")
    async with engine_for("encoder") as engine:
        found = await engine.embed(TEXTS)
        for text, vector in zip(TEXTS, found, strict=True):
            ids = engine.tokenizer.encode(text, add_special_tokens=True)
            assert (ids[0], ids[-1]) == (2, 3)
            with torch.inference_mode():
                mean = reference(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
            np.testing.assert_allclose(vector, functional.normalize(mean, dim=0).numpy(), atol=1e-4)
        close([(await engine.embed(text))[0] for text in TEXTS], found)
        ids = [engine.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
        close(await engine.embed(ids), found)
        assert idle(engine)


async def test_a_decoder_embeds_and_generates_at_once(engine_for: Any) -> None:
    async with engine_for("decoder") as engine:
        vectors = [(await engine.embed(ids))[0] for ids in IDS]
        tokens = [(await engine.generate(ids, **GREEDY)).token_ids for ids in IDS]
    async with engine_for("decoder", max_num_batched_tokens=24, max_num_seqs=6) as engine:
        found: dict[str, Any] = {}

        async def embed(name: str) -> None:
            found[name] = await engine.embed(IDS)

        async def generate(number: int) -> None:
            assert (await engine.generate(IDS[number], **GREEDY)).token_ids == tokens[number]

        async with anyio.create_task_group() as group:
            for number in range(len(IDS)):
                group.start_soon(generate, number)
                group.start_soon(embed, str(number))
        for number in range(len(IDS)):
            close(found[str(number)], vectors)
        assert engine.snapshot().scheduler.prefix_hits > 0
        await eventually(lambda: idle(engine))


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST"])
async def test_preempted_and_in_pieces_the_vector_is_the_same(engine_for: Any, pooling: str) -> None:
    kind = f'{{"pooling_type": "{pooling}", "use_activation": false}}'
    async with engine_for("decoder", pooler_config=kind, enable_prefix_caching=False) as engine:
        assert engine.ready.pooling.pooling_type == pooling
        vectors = [(await engine.embed(ids))[0] for ids in IDS]
    tight = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 14, "max_model_len": 200}
    tight |= {"max_num_batched_tokens": 12, "pooler_config": kind}
    async with engine_for("decoder", **tight) as engine:
        async with anyio.create_task_group() as group:
            for ids in IDS[:3]:
                group.start_soon(lambda ids=ids: engine.generate(ids, **(GREEDY | {"max_tokens": 90})))
            found = await engine.embed(IDS)
        close(found, vectors)
        assert engine.snapshot().scheduler.preemptions > 0


@pytest.mark.parametrize("name", ["decoder", "encoder"])
async def test_a_worker_that_dies_costs_no_vector(engine_for: Any, name: str) -> None:
    prompts = IDS if name == "decoder" else [[token % 80 for token in ids[:90]] for ids in IDS]
    async with engine_for(name) as engine:
        vectors = [(await engine.embed(ids))[0] for ids in prompts]
    hosts = WorkerHosts()
    async with engine_for(name, worker=hosts, max_num_batched_tokens=96, enable_prefix_caching=False) as engine:
        names, lost = dict[int, str](), list[set[str]]()

        def die_now_and_then(plan: Any) -> None:
            """Twice, far apart, and never twice of the same request: that one would be blamed, and rightly."""
            names.update((new.row, new.request_id) for new in plan.new_rows)
            here = {names[row] for row in plan.rows}
            if len(lost) < 2 and plan.step >= 2 + 8 * len(lost) and here and not any(here & group for group in lost):
                lost.append(here)
                raise RuntimeError("the worker died")

        hosts.worker.on_launch = die_now_and_then
        with anyio.fail_after(30):
            close(await engine.embed(prompts * 6), vectors * 6)
        assert engine.snapshot().scheduler.worker_losses == 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spare"), [("encoder", False), ("decoder", True)])
async def test_in_a_process_that_is_killed(engine_for: Any, name: str, spare: bool) -> None:
    prompts = IDS if name == "decoder" else [[token % 80 for token in ids[:90]] for ids in IDS]
    async with engine_for(name) as engine:
        vectors = [(await engine.embed(ids))[0] for ids in prompts]
    async with engine_for(name, worker_process=True, spare_worker=spare) as engine:
        if spare:
            await with_spare(engine)
        close(await engine.embed(prompts), vectors)
        found: list[list[list[float]]] = []

        async def embed() -> None:
            found.append(await engine.embed(prompts * 40))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(embed)
                steps = engine.snapshot().scheduler.steps
                await eventually(lambda: engine.snapshot().scheduler.steps > steps + 1)
                os.kill(engine.snapshot().worker_pid, signal.SIGKILL)
            close(found[0], vectors * 40)
            await eventually(lambda: engine.snapshot().scheduler.worker_losses == 1)


async def test_scores_of_a_cross_encoder(engine_for: Any, folders: dict[str, Path]) -> None:
    reference = tiny_encoder.write_encoder(folders["cross"], lambda: tiny_encoder.bert(1))
    async with engine_for("cross") as engine:
        assert engine.ready.pooling.tasks == ("score", "classify")
        found = await engine.score("a fox", ["a dog", "the quick fox", "9"])
        for text, score in zip(["a dog", "the quick fox", "9"], found, strict=True):
            ids, segment, _ = engine.tokenizer.encode_pair("a fox", text, most=None, side="right")
            assert ids.count(3) == 2
            assert segment == ids.index(3) + 1
            types = torch.tensor([[int(place >= segment) for place in range(len(ids))]])
            with torch.inference_mode():
                expected = reference(torch.tensor([ids]), token_type_ids=types).logits[0, 0].sigmoid()
            assert score == pytest.approx(float(expected), abs=1e-4)
        pairs = await engine.score(["a fox", "b", "a fox"], ["a dog", "the quick fox", "9"])
        assert [pairs[0], pairs[2]] == pytest.approx([found[0], found[2]], abs=1e-5)
        assert pairs[1] != pytest.approx(found[1], abs=1e-4)
        raw = await engine.score("a fox", "a dog", PoolingParams(use_activation=False))
        assert 1 / (1 + np.exp(-raw[0])) == pytest.approx(found[0], abs=1e-5)
        long = TextPrompt("x " * 300)
        with pytest.raises(ContextLengthExceeded):
            await engine.score("a", "x " * 300)
        with pytest.raises(InvalidRequest):
            await engine.score([long], ["a"])
        cut = await engine.score_pairs(["a"], ["x " * 300], truncation=Truncation(-1, "right"))
        assert cut[0].prompt_tokens == tiny_encoder.POSITIONS
        for one, other in ((["a", "b"], ["c"]), ([], []), ("a", [])):
            with pytest.raises(InvalidRequest):
                await engine.score(one, other)


async def test_scores_by_vectors_and_labels(engine_for: Any) -> None:
    async with engine_for("encoder") as engine:
        ones, others = await engine.embed(["a fox", "b"]), await engine.embed(["a dog", "a fox"])
        found = await engine.score(["a fox", "b"], ["a dog", "a fox"])
        assert found == pytest.approx([float(np.dot(*pair)) for pair in zip(ones, others, strict=True)], abs=1e-5)
        assert (await engine.score("a fox", ["a fox"]))[0] == pytest.approx(1.0, abs=1e-5)
        pairs = await engine.score_pairs(["a fox"], ["a", "b"])
        assert [pair.prompt_tokens for pair in pairs] == [6 + 3, 3]  # the first text counts once
    async with engine_for("classes") as engine:
        (probs,) = await engine.classify("a fox")
        assert len(probs) == 3
        assert sum(probs) == pytest.approx(1.0, abs=1e-5)
        assert engine.ready.pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        with pytest.raises(InvalidRequest, match="does not support the task score; it supports classify"):
            await engine.score("a", "b")
        with pytest.raises(InvalidRequest, match="does not support the task embed"):
            await engine.embed("a")


async def test_a_task_that_the_model_lacks_is_refused_by_name(engine_for: Any) -> None:
    async with engine_for("encoder") as engine:
        for call in (engine.generate("a"), engine.generate([5, 6])):
            with pytest.raises(InvalidRequest, match="does not generate text; it supports embed") as caught:
                await call
            assert (caught.value.param, caught.value.code) == ("model", "unsupported_task")
        for wrong, param in (
            (PoolingParams(dimensions=8), "dimensions"),
            (PoolingParams(task="classify"), "model"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await engine.pool_all(["a"], wrong)
            assert caught.value.param == param
        for prompt in ([], [tiny_encoder.VOCABULARY], [-1], "\ud800", [5] * 97, "x " * 95):
            with pytest.raises(InvalidRequest):
                await engine.embed([prompt])
        assert len((await engine.embed([[5] * 96]))[0]) == 48  # the whole context
        with pytest.raises(InvalidRequest):
            await engine.pool_all([PairPrompt("a", "\ud800")])
    async with engine_for("decoder", runner="generate") as engine:
        with pytest.raises(InvalidRequest, match="does not support pooling") as caught:
            await engine.embed("a")
        assert caught.value.code == "unsupported_task"
        assert (await engine.generate("a", max_tokens=2, temperature=0.0, ignore_eos=True)).usage.completion_tokens == 2
    async with engine_for("decoder", runner="pooling") as engine:
        assert len((await engine.embed("a"))[0]) == 32
        with pytest.raises(InvalidRequest, match="does not generate text"):
            await engine.generate("a")


async def test_long_inputs_are_cut_where_asked(engine_for: Any) -> None:
    text = "abcdefghij " * 20
    async with engine_for("encoder") as engine:
        ids = engine.tokenizer.encode(text, add_special_tokens=True)
        for tokens, side in ((10, "right"), (-1, "right"), (10, "left")):
            kept = 96 if tokens == -1 else tokens
            inner = ids[1:-1][: kept - 2] if side == "right" else ids[1:-1][-(kept - 2) :]
            pooled = await engine.pool_all([TextPrompt(text, truncation=Truncation(tokens, side))])
            assert list(pooled[0].prompt_token_ids) == [2, *inner, 3]
            assert pooled[0].usage.truncated
            pooled = await engine.pool_all([TokensPrompt(ids[:90], truncation=Truncation(tokens, side))])
            whole = ids[:90]
            assert list(pooled[0].prompt_token_ids) == (whole[:kept] if side == "right" else whole[-kept:])
            assert pooled[0].usage.truncated == (kept < 90)


async def test_a_caller_who_leaves_takes_all_of_it_along(engine_for: Any) -> None:
    async with engine_for("encoder", max_num_seqs=4) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.embed(["a fox"] * 5000))
            await eventually(lambda: engine.snapshot().scheduler.steps > 3)
            group.cancel_scope.cancel()
        await eventually(lambda: idle(engine))
        assert engine.snapshot().prompt_tokens_computed < 5000 * 6
        assert len(await engine.embed(["a", "b"])) == 2


async def test_a_large_call_neither_needs_all_room_at_once_nor_keeps_others_out(engine_for: Any) -> None:
    room = {"max_num_seqs": 4, "max_num_queued_reqs": 4}
    async with engine_for("encoder", **room) as engine:
        async with anyio.create_task_group() as group:
            large: list[Any] = []

            async def call() -> None:
                large.append(await engine.embed(["a fox"] * 300, wait=False, concurrency=256))

            group.start_soon(call)
            await eventually(lambda: engine.snapshot().open_requests >= 8)
            with pytest.raises(EngineOverloaded):  # as any other request that does not wait
                await engine.embed("b", wait=False, concurrency=1)
            assert len(await engine.embed("b")) == 1  # a waiting request comes in between
            assert not large
        assert len(large[0]) == 300


async def test_an_api_process_gives_the_vectors_of_its_engine(engine_for: Any) -> None:
    for name, prompts in (("decoder", IDS), ("cross", [PairPrompt("a fox", "b"), "a fox", [5, 6, 7]])):
        async with engine_for(name) as engine, front_pair(engine) as pair:
            local = [each.values for each in await engine.pool_all(prompts)]
            over = await pair.remote.pool_all(prompts, PoolingParams(priority=3), cache_salt=b"salt", tenant="anna")
            close([each.values for each in over], local)
            assert [each.usage.prompt_tokens for each in over] == [len(each.prompt_token_ids) for each in over]
            sent = [message for message in pair.from_front.frames if isinstance(message, Submit)]
            assert {message.pooling for message in sent} == {PoolingParams(priority=3)}
            ends = [end for frame in pair.to_front.frames for end in getattr(frame, "ended", ())]
            assert sum(isinstance(end, Ended) and end.pooled is not None for end in ends) == len(prompts)
            with pytest.raises(InvalidRequest):
                await pair.remote.pool_all(["\ud800"])
            with pytest.raises(InvalidRequest):
                await pair.remote.pool_all(["a"], PoolingParams(dimensions=4))
            await eventually(lambda engine=engine: idle(engine))


def test_llm_embeds_classifies_and_scores(folders: dict[str, Path]) -> None:
    with LLM(folders["encoder"], device="cpu", num_threads=1) as llm:
        one, two = llm.embed(["a fox", {"prompt_token_ids": [2, 5, 3]}], use_tqdm=False)
        assert len(one.outputs.embedding) == one.outputs.hidden_size == 48
        assert two.prompt_token_ids == [2, 5, 3]
        (raw,) = llm.encode("a fox", PoolingParams(use_activation=True), use_tqdm=False, pooling_task="embed")
        np.testing.assert_allclose(raw.outputs.data, one.outputs.embedding, atol=1e-5)
        scores = llm.score("a fox", ["a fox", "b"], use_tqdm=False)
        assert scores[0].outputs.score == pytest.approx(1.0, abs=1e-5)
        assert len(scores) == 2
        (cut,) = llm.embed("x " * 300, use_tqdm=False, truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 96
        for call in (lambda: llm.classify("a"), lambda: llm.embed("x " * 300), lambda: llm.generate("a")):
            with pytest.raises(InvalidRequest):
                call()
    with LLM(folders["classes"], device="cpu", num_threads=1) as llm:
        (found,) = llm.classify("a fox", use_tqdm=False)
        assert found.outputs.num_classes == 3


async def test_a_call_is_one_request_to_its_tenants_limits(engine_for: Any) -> None:
    tenants = (
        TenantConfig(name="anna", requests_per_minute=2, max_concurrency=3),
        TenantConfig(name="bert", tokens_per_minute=100),
    )
    hosts = WorkerHosts()
    async with engine_for("encoder", tenants=tenants, worker=hosts) as engine:
        most = [0]
        hosts.worker.on_launch = lambda plan: most.append(engine.snapshot().open_requests)
        for door in ("local", "remote"):
            async with front_pair(engine) as pair:
                ask = engine if door == "local" else pair.remote
                assert len(await ask.embed(["a fox"] * 30, tenant="anna", wait=False)) == 30
        assert max(most) == 3
        with pytest.raises(RateLimited, match="2 requests per minute"):
            await engine.embed("a", tenant="anna")
        anna, _ = engine.snapshot().tenants
        assert (anna.requests, anna.inside, anna.prompt_tokens) == (2, 0, 2 * 30 * 6)
        await engine.embed(["a fox"] * 12, tenant="bert")
        with pytest.raises(RateLimited, match="100 tokens per minute"):
            await engine.embed(["a fox"] * 40, tenant="bert")


@pytest.mark.parametrize("level", [1, 2])
async def test_an_encoder_sleeps_and_wakes(engine_for: Any, level: int) -> None:
    async with engine_for("encoder") as engine:
        before = await engine.embed(TEXTS)
        await engine.sleep(level, "keep")
        async with anyio.create_task_group() as group:
            found: list[Any] = []

            async def embed() -> None:
                found.append(await engine.embed(TEXTS))

            group.start_soon(embed)
            await eventually(lambda: engine.snapshot().open_requests > 0)
            await engine.wake()
        close(found[0], before)


async def test_a_decoder_with_a_classifier_scores_pairs(folders: dict[str, Path], tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folders["decoder"])
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(3)
    reference = transformers.LlamaForSequenceClassification(config).eval()
    reference.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders["decoder"] / name, tmp_path / name)
    async with Engine(tmp_path, **SETTINGS) as engine:
        assert engine.ready.pooling.tasks == ("score", "classify")
        (score,) = await engine.score("what is it?", " a fox", PoolingParams(use_activation=False))
        ids = engine.tokenizer.encode("what is it? a fox", add_special_tokens=True)
        with torch.inference_mode():
            expected = float(reference(torch.tensor([ids])).logits[0, 0])
        assert score == pytest.approx(expected, abs=1e-4)
        with pytest.raises(InvalidRequest, match="does not generate text; it supports score, classify"):
            await engine.generate("a")
