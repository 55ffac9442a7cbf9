"""`LLMEngine` and `AsyncLLMEngine`: vLLM's engines over ours, and the names that `LLM` refuses."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import troupellm
from troupellm import (
    LLM,
    AsyncLLMEngine,
    Engine,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture
def make_engine(model_folder: Path, fake_worker: Any) -> Callable[..., Engine]:
    def make(**settings: Any) -> Engine:
        return Engine(model_folder, worker=lambda folder: fake_worker, **settings)

    return make


@contextmanager
def running(engine: Engine) -> Iterator[LLMEngine]:
    stepped = LLMEngine(engine)
    try:
        yield stepped
    finally:
        stepped.shutdown()


def drained(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            found.setdefault(output.request_id, []).append(output)
    return found


def test_steps_give_outputs_until_every_request_has_ended(make_engine: Any, expected: Any) -> None:
    with running(make_engine()) as engine:
        assert engine.step() == []
        for number in range(3):
            prompt = {"prompt_token_ids": [30 + number]}
            assert engine.add_request(str(number), prompt, SamplingParams(max_tokens=40 + number)) == str(number)
        assert engine.get_num_unfinished_requests() == 3
        found = drained(engine)
        for number in range(3):
            outputs = found[str(number)]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].outputs[0].token_ids == expected([30 + number], 40 + number)
            assert outputs[-1].outputs[0].finish_reason == "length"
            lengths = [len(output.outputs[0].token_ids) for output in outputs if output.outputs]
            assert lengths == sorted(lengths)
        assert not engine.has_unfinished_requests()


def test_output_kinds_give_the_whole_the_news_or_the_end(make_engine: Any, expected: Any) -> None:
    with running(make_engine(flush_interval=0.0)) as engine:
        params = SamplingParams(max_tokens=30, n=2, stream_interval=1)
        engine.add_request("delta", [5], SamplingParams(max_tokens=30, n=2, output_kind=DELTA, stream_interval=1))
        engine.add_request("final", [5], SamplingParams(max_tokens=30, output_kind=FINAL))
        engine.add_request("best", [5], SamplingParams(max_tokens=30, n=1, best_of=2))
        engine.add_request("whole", [5], params)
        params.max_tokens = 1  # of requests to come
        found = drained(engine)
        whole = expected([5], 30)
        for index in range(2):
            news = [one for output in found["delta"] for one in output.outputs if one.index == index]
            assert [token for one in news for token in one.token_ids] == whole
            assert "".join(one.text for one in news) == found["whole"][-1].outputs[index].text
        for name in ("final", "best"):
            (output,) = found[name]
            assert output.finished
            assert list(output.outputs[0].token_ids) == whole


def test_an_aborted_request_has_no_further_outputs(make_engine: Any, fake_worker: Any) -> None:
    fake_worker.gate = threading.Event()
    with running(make_engine()) as engine:
        engine.add_request("a", [5], SamplingParams(max_tokens=2000))
        with pytest.raises(troupellm.InvalidRequest, match="request_id a is taken"):
            engine.add_request("a", [6], SamplingParams(max_tokens=2))
        fake_worker.gate.set()
        engine.abort_request(["a", "unknown"])
        assert not engine.has_unfinished_requests()
        assert engine.step() == []
        engine.add_request("a", [6], SamplingParams(max_tokens=2))
        assert drained(engine)["a"][-1].finished


def test_a_request_that_cannot_be_served_is_refused_at_once(make_engine: Any, fake_worker: Any) -> None:
    fake_worker.sick = 77
    with running(make_engine()) as engine:
        with pytest.raises(troupellm.ContextLengthExceeded):
            engine.add_request("a", [5] * 5000, SamplingParams())
        with pytest.raises(troupellm.InvalidRequest, match="lora_request must be a LoRARequest, got object"):
            engine.add_request("a", "x", SamplingParams(), lora_request=object())
        with pytest.raises(troupellm.InvalidRequest, match="start with enable_lora"):
            engine.add_request("a", "x", SamplingParams(), lora_request=troupellm.LoRARequest("sql", 1, "/nowhere"))
        with pytest.raises(troupellm.ConfigError, match="collective_rpc is known from vLLM"):
            engine.collective_rpc("f")
        assert not engine.has_unfinished_requests()
        engine.add_request("sick", [77], SamplingParams())
        with pytest.raises(troupellm.TroupeError):
            engine.step()
        assert engine.step() == []
    with pytest.raises(troupellm.EngineStopped):
        engine.step()


def test_answers_are_iterated_over_in_any_loop(make_engine: Any, expected: Any) -> None:
    engine = AsyncLLMEngine(make_engine())

    async def answer(name: str, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
        return [output async for output in engine.generate(prompt, params, request_id=name)]

    async def several() -> None:
        delta = SamplingParams(max_tokens=20, output_kind=DELTA)
        outputs = await asyncio.gather(*(answer(str(number), [30 + number], delta) for number in range(4)))
        for number, found in enumerate(outputs):
            assert found[-1].finished
            tokens = [token for output in found for one in output.outputs for token in one.token_ids]
            assert tokens == expected([30 + number], 20)

    async def left() -> None:
        answers = engine.generate([5], SamplingParams(max_tokens=2000), "left")
        async for _ in answers:
            break
        await answers.aclose()
        assert engine.get_num_unfinished_requests() == 0
        async for output in engine.generate([5], SamplingParams(max_tokens=2000), "ended"):
            if not output.finished:
                await engine.abort(["ended", "unknown"])
        assert engine.get_num_unfinished_requests() == 0
        await engine.check_health()
        with pytest.raises(troupellm.InvalidRequest):
            [_ async for _ in engine.encode("x", PoolingParams(), "p")]
        assert engine.get_num_unfinished_requests() == 0

    asyncio.run(several())
    asyncio.run(left())
    engine.shutdown()
    assert engine.errored

    async def late() -> None:
        with pytest.raises(troupellm.EngineStopped):
            await engine.check_health()

    asyncio.run(late())


def test_prompts_have_vllms_keywords(make_engine: Any, model_folder: Path, fake_worker: Any) -> None:
    assert TokensPrompt(prompt_token_ids=[1, 2]) == TokensPrompt([1, 2])  # type: ignore[call-arg]
    assert TextPrompt(prompt="x") == TextPrompt("x")  # type: ignore[call-arg]
    with LLM(model_folder, worker=lambda folder: fake_worker, tensor_parallel_size=1, max_num_seqs=None) as llm:
        one, two = llm.generate(
            [TokensPrompt(prompt_token_ids=[5, 6]), {"prompt": "x"}],  # type: ignore[call-arg]
            SamplingParams(max_tokens=2),
            use_tqdm=False,
            priority=[0, 1],
        )
        assert (one.prompt_token_ids, two.prompt) == ([5, 6], "x")
        for refused in (
            lambda: llm.collective_rpc("f"),
            lambda: llm.apply_model(print),
        ):
            with pytest.raises(troupellm.ConfigError, match="is known from vLLM but not supported here"):
                refused()
        with pytest.raises(troupellm.InvalidRequest, match="priorities"):
            llm.generate("x", priority=[1, 2])
    with pytest.raises(troupellm.ConfigError, match="one server per device"):
        LLM(model_folder, pipeline_parallel_size=2)


def test_a_cache_salt_may_be_a_text_and_come_with_the_prompt(model_folder: Path, fake_worker: Any) -> None:
    ids = list(range(10, 50))
    with LLM(model_folder, worker=lambda folder: fake_worker) as llm:

        def cached(**further: Any) -> int:
            prompt = {"prompt_token_ids": ids, **further}
            return llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens

        found = [cached(cache_salt="A"), cached(cache_salt="A"), cached(cache_salt="B"), cached(), cached()]
        assert [count > 0 for count in found] == [False, True, False, False, True]
        for wrong in ("a" * 129, "a@b", "a/b"):
            with pytest.raises(troupellm.InvalidRequest, match="cache_salt must"):
                cached(cache_salt=wrong)


@pytest.mark.anyio
async def test_the_engine_takes_a_text_as_cache_salt(make_engine: Any) -> None:
    async with make_engine() as engine:
        ids = list(range(10, 50))
        cached = [
            (await engine.generate(ids, max_tokens=1, cache_salt=salt)).usage.cached_tokens for salt in ("A", b"A", "B")
        ]
        assert [count > 0 for count in cached] == [False, True, False]


@pytest.mark.anyio
async def test_a_request_keeps_the_parameters_that_it_was_made_with(make_engine: Any) -> None:
    async with make_engine() as engine:
        params = SamplingParams(max_tokens=5)
        stream = engine.stream([5, 6], params)
        params.max_tokens = 1
        async with stream:
            assert len((await stream.collect()).token_ids) == 5
