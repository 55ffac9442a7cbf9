"""Decoders that only `transformers` has run by its code over our paged attention, and equal it all the same."""

import json
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import troupellm
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.runner import runner as runner_module
from troupellm.models.transformers_backend import attention
from troupellm.models.transformers_backend.decoder import TransformersDecoder, read_model
from troupellm.models.transformers_backend.describe import describe
from troupellm.models.worker.check_transformers import check_decoder
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.tests.support.checkpoints.byte_tokenizer import write_tokenizer
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import SIZES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.ragged_batch import check_ragged_batch

NEOX = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
FAMILIES = {
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES, sliding_window=20, use_bias=True),
    "stablelm": lambda: transformers.StableLmConfig(**SIZES, partial_rotary_factor=0.5, use_parallel_residual=True),
    "cohere": lambda: transformers.CohereConfig(**SIZES, logit_scale=0.3, use_qk_norm=True),
    "cohere2": lambda: transformers.Cohere2Config(**SIZES, sliding_window=20, sliding_window_pattern=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**NEOX),
    "opt": lambda: transformers.OPTConfig(**{**NEOX, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=300,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=20),
    "phi3_long": lambda: transformers.Phi3Config(
        **{**SIZES, "max_position_embeddings": 512},
        original_max_position_embeddings=1,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "attention_factor": 1.3,
            "short_factor": [1.0] * 8,
            "long_factor": [1.5 + index for index in range(8)],
        },
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        head_dim=32,
        query_pre_attn_scalar=64,
        sliding_window=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
        tie_word_embeddings=False,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=20
    ),
}
"""The last three are families of ours, too."""
QUICK = ("starcoder2", "cohere2", "gpt_neox", "gemma2")
MAMBA = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
NO_INTERFACE = "does not go with paged attention: not all of its layers attend by the interface of transformers"
REFUSED = {
    "bloom": (
        lambda: transformers.BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4),
        f"BloomForCausalLM {NO_INTERFACE}",
    ),
    "falcon": (
        lambda: transformers.FalconConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        f"FalconForCausalLM {NO_INTERFACE}",
    ),
    "diffllama": (
        lambda: transformers.DiffLlamaConfig(**SIZES),
        "DiffLlamaForCausalLM does not go with paged attention: a layer attends more than once",
    ),
    "mamba": (
        lambda: transformers.MambaConfig(**MAMBA),
        "MambaForCausalLM has more to remember than keys and values; it is not supported",
    ),
    "t5": (
        lambda: transformers.T5Config(vocab_size=300, d_model=64, num_layers=2, num_heads=4, d_kv=16, d_ff=64),
        "config.json: architecture T5ForConditionalGeneration is no decoder of transformers",
    ),
}


class BackendPair(Pair):
    """One checkpoint in `transformers`, alone and over our attention."""

    def open(self) -> None:
        self.config = describe(self.folder, ConfigReader.load(self.folder))
        model = read_model(self.folder, self.config, torch.float32, dummy=False, seed=0)
        self.decoder = TransformersDecoder(self.config, model, max_model_len=MAX_LEN)


PARAMS = [pytest.param(name, marks=pytest.mark.slow if name not in QUICK else ()) for name in FAMILIES]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=PARAMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return BackendPair(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


def test_the_model_is_described_by_itself(pair: Pair) -> None:
    config, reference = pair.config, pair.reference
    assert config.implementation == "transformers"
    assert config.num_parameters == reference.num_parameters()
    assert (config.num_layers, config.layers[0].num_heads, config.hidden_size) == (2, 4, 64)
    kinds = getattr(reference.config, "layer_types", None) or [None, None]
    window = getattr(reference.config, "sliding_window", None)
    assert config.windows == tuple(None if kind == "full_attention" else window for kind in kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_a_backend_of_transformers_passes_its_own_check(pair: Pair, dtype: torch.dtype) -> None:
    cache = KVCache(pair.config, 12, 8, dtype)
    check_decoder(pair.decoder, cache, max_model_len=MAX_LEN)


@pytest.mark.parametrize("piece", [runner_module.PIECE_TOKENS, 11])
def test_a_ragged_batch_with_prefill_and_decode_mixed(pair: Pair, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PIECE_TOKENS", piece)
    check_ragged_batch(pair)


def test_preemption_by_recompute_goes_on_with_the_same_tokens(pair: Pair) -> None:
    prompt = make_prompt(21)
    driver = Driver(pair.runner())
    driver.submit(0, prompt)
    driver.generate(0, 5)
    again = Driver(pair.runner(), seed=8)
    again.submit(0, driver.tokens[0])
    again.generate(0, 5)
    pair.check(prompt, driver.answer(0) + again.answer(0))


def test_logits_are_within_tolerance(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plain = [], pair.decoder.logits
    monkeypatch.setattr(pair.decoder, "logits", lambda hidden: seen.append(plain(hidden)) or seen[-1].clone())
    driver = Driver(pair.runner())
    prompt = make_prompt(40)
    driver.submit(0, prompt)
    driver.run({0: 23})
    driver.generate(0, 6)
    expected = pair.logits(driver.tokens[0])[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_embeddings_from_outside_take_the_place_of_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pair.decoder.forward

    def from_outside(batch: ForwardBatch, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        places = torch.arange(batch.token_ids.shape[0])
        values = pair.decoder.body.get_input_embeddings()(batch.token_ids)
        return plain(replace(batch, token_ids=torch.zeros_like(places), inputs=(places, values)), caches)

    monkeypatch.setattr(pair.decoder, "forward", from_outside)
    driver = Driver(pair.runner())
    driver.submit(0, make_prompt(20))
    driver.generate(0, 5)
    pair.check(make_prompt(20), driver.answer(0))


def test_the_model_of_transformers_still_computes_its_own_logits(pair: Pair) -> None:
    prompt = make_prompt(40)
    expected = pair.logits(prompt)
    torch.testing.assert_close(pair.decoder.plain_logits(prompt), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_does_not_go_with_paged_attention_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    config = make()
    known = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    config.architectures = [known._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        describe(tmp_path, ConfigReader.load(tmp_path))
    assert caught.value.message == message


@pytest.mark.parametrize("mistake", [{"scale": 0.9}, {"window": 3}, {"layer": 0}])
def test_a_model_that_pages_compute_otherwise_is_found_out(
    mistake: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for all that a model may do beside what the interface shows."""
    pair = BackendPair(tmp_path, FAMILIES["starcoder2"]())
    if "window" in mistake:
        pair.decoder.config = pair.config.with_layers(window=3)
    answer = attention.PagedAnswer.__call__

    def wrong(self: attention.PagedAnswer, call: attention.AttentionCall) -> torch.Tensor:
        changes = {name: value for name, value in mistake.items() if name != "window"}
        return answer(self, replace(call, **changes))

    monkeypatch.setattr(attention.PagedAnswer, "__call__", wrong)
    with pytest.raises(ModelLoadError, match="Starcoder2ForCausalLM does not go with paged attention: what it"):
        check_decoder(pair.decoder, KVCache(pair.decoder.config, 12, 8, torch.float32), max_model_len=MAX_LEN)


@pytest.fixture(scope="module")
def stablelm(tmp_path_factory: pytest.TempPathFactory) -> BackendPair:
    folder = tmp_path_factory.mktemp("stablelm")
    pair = BackendPair(folder, transformers.StableLmConfig(**SIZES))
    write_tokenizer(folder, 300)
    return pair


def load(folder: Path, **settings: object) -> list[LoadProgress]:
    """Through the worker; what it reports on the way."""
    seen: list[LoadProgress] = []
    worker = ModelWorker(folder)
    flat = {"model": str(folder), "device": "cpu", "kv_cache_memory_bytes": 2**20}
    worker.load(EngineConfig.from_flat(flat | settings), seen.append)
    worker.close()
    return seen


def test_a_family_that_is_not_ours_falls_back_with_a_line(stablelm: BackendPair, tmp_path: Path) -> None:
    details = [progress.detail for progress in load(stablelm.folder)]
    line = "StableLmForCausalLM runs by the code of transformers, over our paged attention: "
    assert f"{line}troupellm has no family for it" in details
    with pytest.raises(ModelLoadError, match="architecture StableLmForCausalLM is not supported"):
        load(stablelm.folder, model_impl="troupellm")
    assert any(line in progress.detail for progress in load(stablelm.folder, load_format="dummy", dtype="bfloat16"))


def test_a_family_of_ours_runs_by_transformers_only_when_told(tmp_path: Path) -> None:
    Pair(tmp_path, transformers.LlamaConfig(**SIZES))
    assert not any("transformers" in progress.detail for progress in load(tmp_path))
    told = [progress.detail for progress in load(tmp_path, model_impl="transformers")]
    assert "LlamaForCausalLM runs by the code of transformers, over our paged attention: as model_impl says" in told


def test_weights_come_from_safetensors_alone_and_all_of_them(stablelm: BackendPair, tmp_path: Path) -> None:
    config = stablelm.config
    weights = load_file(stablelm.folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((stablelm.folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        read_model(tmp_path, config, torch.float32, dummy=False, seed=0)
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, message in (
        ({key: value for key, value in weights.items() if key != name}, f"missing tensor {name}"),
        (weights | {"another": torch.zeros(2)}, "unexpected tensor another"),
        (weights | {name: torch.zeros(3, 3)}, f"mismatched tensor {name}"),
    ):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=message):
            read_model(tmp_path, config, torch.float32, dummy=False, seed=0)


def test_code_of_the_checkpoint_is_never_run(stablelm: BackendPair, tmp_path: Path) -> None:
    values = json.loads((stablelm.folder / "config.json").read_bytes())
    (tmp_path / "code.py").write_text("raise SystemExit('remote code was run')")
    values |= {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "mine", "architectures": ["Mine"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError):
        describe(tmp_path, ConfigReader.load(tmp_path))


@pytest.mark.anyio
async def test_through_the_engine_with_preemption_and_prefix_hits(stablelm: BackendPair) -> None:
    prompts = [make_prompt(length) for length in (30, 25, 40, 33, 28, 37)]
    settings = {"max_num_batched_tokens": 32, "max_model_len": 96}
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    answers: dict[int, list[int]] = {}

    async def one(engine: troupellm.Engine, index: int) -> None:
        answers[index] = list((await engine.generate(prompts[index], **greedy)).token_ids)

    async with troupellm.Engine(stablelm.folder, num_gpu_blocks_override=12, **settings) as engine:
        async with anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(one, engine, index)
        assert engine.snapshot().scheduler.preemptions > 0
    async with troupellm.Engine(stablelm.folder, **settings) as engine:
        await one(engine, 2)
        again = await engine.generate([*prompts[2], 5, 6], **greedy)
    assert again.usage.cached_tokens >= 32
    stablelm.check([*prompts[2], 5, 6], list(again.token_ids))
    for index, prompt in enumerate(prompts):
        stablelm.check(prompt, answers[index])
