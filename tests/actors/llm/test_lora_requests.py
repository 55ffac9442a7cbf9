"""`lora_request` of vLLM's scripts: `LLM`, `LLMEngine` and `AsyncLLM` load an adapter and answer with it."""

import asyncio
from pathlib import Path

import pytest

import troupellm
from troupellm import LLM, AsyncLLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SETTINGS = {"kv_cache_memory_bytes": 4 * 2**20, "device": "cpu", "num_threads": 1, "enable_lora": True, "max_loras": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "tiny")
    for seed, name in enumerate("ab"):
        write_tiny_adapter(tmp_path / name, seed)
    return tmp_path


def test_a_script_names_one_adapter_or_one_for_each_prompt(folder: Path) -> None:
    a, b = (LoRARequest(name, 1 + number, str(folder / name)) for number, name in enumerate("ab"))
    with LLM(str(folder / "tiny"), **SETTINGS) as llm:
        prompts = [{"prompt_token_ids": [5, 6, 7]}] * 4
        mixed = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[None, a, b, a])
        base, one, other, again = (output.outputs[0].token_ids for output in mixed)
        assert one == again
        assert len({*map(tuple, (base, one, other))}) == 3
        whole = llm.generate(prompts[:1], GREEDY, use_tqdm=False, lora_request=b)
        assert whole[0].outputs[0].token_ids == other
        known = llm.generate(prompts[:1], GREEDY, use_tqdm=False, lora_request=LoRARequest("a"))
        assert known[0].outputs[0].token_ids == one
        assert [info.name for info in llm.engine.adapters] == ["a", "b"]
        with pytest.raises(troupellm.InvalidRequest, match="4 prompts need as many lora_request, got 1"):
            llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[a])
        with pytest.raises(troupellm.AdapterError, match="adapter_config.json"):
            llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=LoRARequest("c", 3, str(folder)))
        with pytest.raises(troupellm.ModelNotFound):
            llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=LoRARequest("c"))
    for fields in ({"lora_name": ""}, {"lora_name": "x", "lora_int_id": 0}):
        with pytest.raises(troupellm.InvalidRequest):
            LoRARequest(**fields)


def test_vectors_and_scores_are_those_of_the_adapter(folder: Path) -> None:
    a, b = (LoRARequest(name, 1 + number, str(folder / name)) for number, name in enumerate("ab"))
    with LLM(str(folder / "tiny"), **SETTINGS) as llm:
        prompts = [{"prompt_token_ids": [5, 6, 7]}] * 3
        mixed = llm.embed(prompts, use_tqdm=False, lora_request=[None, a, b])
        vectors = [output.outputs.embedding for output in mixed]
        assert len(set(map(tuple, vectors))) == 3
        (alone,) = llm.encode(prompts[:1], use_tqdm=False, pooling_task="embed", lora_request=b)
        assert alone.outputs.data == vectors[2]
        scores = [llm.score("one", "other", False, lora_request=request)[0].outputs.score for request in (None, a, b)]
        assert len(set(scores)) == 3
        with pytest.raises(troupellm.InvalidRequest, match="3 prompts need as many lora_request, got 1"):
            llm.embed(prompts, use_tqdm=False, lora_request=[a])
        with pytest.raises(troupellm.ModelNotFound):
            llm.score("one", "other", False, lora_request=LoRARequest("c"))


def test_engines_of_vllm_take_adapters(folder: Path) -> None:
    a = LoRARequest("a", 1, str(folder / "a"))
    arguments = EngineArgs(model=str(folder / "tiny"), **SETTINGS)
    engine = LLMEngine.from_engine_args(arguments)
    try:
        for name, request in (("base", None), ("a", a)):
            engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, GREEDY, lora_request=request)
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        assert found["a"] != found["base"]
    finally:
        engine.shutdown()

    async def ask() -> tuple[int, ...]:
        several = AsyncLLM.from_engine_args(arguments)
        try:
            last = None
            async for output in several.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, "one", lora_request=a):
                last = output
            assert last is not None
            return tuple(last.outputs[0].token_ids)
        finally:
            several.shutdown()

    assert asyncio.run(ask()) == tuple(found["a"])
