"""Kernels are compiled before anybody waits for them: no number of rows, of tokens or of keys has one of its own."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from troupellm.kernels.kv_quant import cache_dtype
from troupellm.load_tests.gpu.models import config_of
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.gpu.batch import triton_planner
from troupellm.models.gpu.graph_dispatch import default_sizes
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.gpu.warm_up import KINDS, Steps, warmed
from troupellm.models.layers.decoder import Decoder
from troupellm.models.memory.plan import MemoryBudget
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import NewRow, SamplingState
from troupellm.tests.support.engines.inside import possible_graphs_of, warm_up_graph
from troupellm.tests.support.gpu.faked_gpu import CUDA, AbsentGpu, AbsentWeights, Launch, absent_gpu

pytest.importorskip("triton")
MANY, LENGTH, TOKENS, BLOCK = 70, 600, 1100, 16


def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


def keys(launches: list[Launch]) -> dict[str, set[str]]:
    """By kernel."""
    found: dict[str, set[str]] = {}
    for launch in launches:
        found.setdefault(launch.kernel.__name__, set()).add(launch.key())
    return found


def test_a_plan_of_any_number_of_rows() -> None:
    from troupellm.kernels.paged_attention.triton_plan import map_decode, map_extend

    with absent_gpu() as launches:
        whole, tasks, blocks = numbers(600), numbers(265, 4), numbers(70, 2)
        for rows in range(1, 513):
            part = whole[rows % 5 : rows % 5 + rows]  # which begins anywhere
            map_decode(part, tasks, kv_heads=8, queries=1, window=0, tile=64)
            map_extend(part, part, blocks, block=32)
    assert {name: len(found) for name, found in keys(launches).items()} == {
        "decode_tasks_kernel": 2,
        "extend_blocks_kernel": 2,
    }


def test_masks_of_any_number_of_rows() -> None:
    from troupellm.kernels.sampling.adjust import keep_bits

    with absent_gpu() as launches:
        logits, rows, bits = numbers(80, 999, dtype=torch.float32), numbers(90, dtype=torch.int64), numbers(90 * 33)
        for count in range(1, 80):
            begin = count % 7
            keep_bits(logits, rows[begin : begin + count], bits[begin : begin + count * 32].view(count, 32))
    assert len(keys(launches)["keep_bits_kernel"]) == 1


def test_any_number_of_assigned_slots() -> None:
    from troupellm.kernels.fused_moe.triton_align import align

    with absent_gpu() as launches:
        for tokens in range(1, 513):
            align(numbers(tokens, 3), 128, 16)
    assert len(keys(launches)["align_kernel"]) == 2


def test_products_of_any_number_of_rows() -> None:
    """One for each number of rows of a tile; of codes also with sums in pieces and without."""
    from troupellm.kernels.quantized_linear.packed_weights import PackedWeight
    from troupellm.kernels.quantized_linear.triton_linear import eight_bit_product, packed_linear

    with absent_gpu() as launches:
        int8 = torch.int8
        weight = PackedWeight(numbers(640, 512, dtype=torch.uint8), "int8", numbers(640, 4, dtype=torch.float32))
        for rows in range(1, 513):
            scale = numbers(rows, dtype=torch.float32)
            eight_bit_product(
                numbers(rows, 512, dtype=int8),
                scale,
                numbers(640, 512, dtype=int8),
                numbers(640, dtype=torch.float32),
                None,
                torch.bfloat16,
            )
            packed_linear(numbers(rows, 512, dtype=torch.bfloat16), weight, None)
    found = {name: len(each) for name, each in keys(launches).items()}
    assert found["eight_bit_kernel"] == 4
    assert found["packed_kernel"] <= 8
    assert found["sum_kernel"] == 1


def described(name: str, folder: Path, *, layers: dict[str, Any] | None = None, **changes: Any) -> DecoderConfig:
    """Of one layer, or of two that differ, and else as it is."""
    config = {**config_of(name), "num_hidden_layers": 1 if layers is None else 2}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return msgspec.structs.replace(describe_decoder(ConfigReader.load(folder)), **changes).with_layers(**layers or {})


VARIED = {
    "layers": {"window": (64, None), "sinks": True}, "hybrid_cache": True, "attention_softcap": 5.0,
    "logit_softcap": 4.0, "activation": "gelu_tanh", "norm_offset": 1.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "8b": ("qwen3-8b", {}, "", "auto"),
    "0.6b": ("qwen3-0.6b", {}, "", "auto"),
    "experts": ("qwen3-30b-a3b", {}, "", "auto"),
    "fp8": ("qwen3-8b", {}, "fp8", "fp8"),
    "int8": ("qwen3-0.6b", {}, "int8", "int8"),
    "int4": ("qwen3-8b", {}, "int4", "auto"),
    "varied": ("qwen3-0.6b", VARIED, "", "auto"),
}
Serve = Callable[[str], tuple[CudaRunner, list[Launch], EngineConfig]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """A model's runner that was warmed up, and what that has launched."""
    monkeypatch.setattr("troupellm.kernels.quantized_linear.packed_weights.PackedWeight.base", 0)
    opened = list[Any]()

    def made(name: str) -> tuple[CudaRunner, list[Launch], EngineConfig]:
        shape, changes, mode, kv = MODELS[name]
        config = described(shape, tmp_path, **changes)
        opened.append(absent_gpu(answer=False))
        launches = opened[-1].__enter__()
        source: Any = AbsentWeights()
        decoder = Decoder(config, QuantizeOnLoad(source, mode) if mode else source, max_model_len=LENGTH)  # type: ignore[arg-type]
        kv_dtype = cache_dtype(kv, torch.bfloat16)
        cache = KVCache(config, 200, BLOCK, kv_dtype, CUDA)
        plan = triton_planner(config, BLOCK, kv_dtype, invariant=False)

        def runner(sizes: Sequence[int]) -> CudaRunner:
            return CudaRunner(
                decoder,
                cache,
                AbsentGpu(),
                max_model_len=LENGTH,
                slots=MANY,
                plan=plan,
                capture_sizes=tuple(sizes),
            )

        engine = EngineConfig.from_flat(
            {
                "model": "m",
                "max_num_seqs": MANY,
                "max_num_batched_tokens": TOKENS,
                "max_model_len": LENGTH,
                "block_size": BLOCK,
            }
        )
        budget = MemoryBudget(
            weight_bytes=0, activation_bytes=0, kv_cache_bytes=0, free_bytes=0, num_blocks=199, max_model_len=LENGTH
        )
        warmed(runner(()), None, engine, budget, lambda progress: None)
        fresh = runner(default_sizes(MANY))
        fresh.graphs.warm_up(lambda progress: None)
        return fresh, launches, engine

    yield made
    for context in reversed(opened):
        context.__exit__(None, None, None)


class Serving(Steps):
    """Steps as requests ask for them, the graphs that they would be replayed from included."""

    def mixed(self, counts: Sequence[int], kind: SamplingState) -> None:
        self._row = self._long  # type: ignore[method-assign]
        self.run(counts, kind)

    def _long(self, row: int, tokens: int, kind: Any) -> NewRow:
        """Its prompt goes on behind the step, where nothing is sampled: of every third row."""
        made = super()._row(row, tokens + 3 * (row % 3 == 2), kind)
        return msgspec.structs.replace(made, num_prompt_tokens=tokens + 3 * (row % 3 == 2))


ASKED = (
    *KINDS, SamplingState(temperature=0.7, min_p=0.1, logprobs=2), SamplingState(temperature=0.7, top_k=9, logprobs=3),
)  # fmt: skip
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("varied", "8b", "int8", "int4")]


@pytest.mark.parametrize("name", ["experts", "fp8", *SLOW])
def test_what_was_warmed_up_serves_every_step(name: str, serve: Serve) -> None:
    runner, launches, _ = serve(name)
    before = {key for found in keys(launches).values() for key in found}
    launches.clear()
    for key in possible_graphs_of(runner):
        warm_up_graph(runner, key)
    runner.graphs.prepare = lambda wanted: None  # type: ignore[method-assign]
    steps = Serving(runner, BLOCK)
    steps._rows = ()
    for number, counts in enumerate(
        (
            [1] * 3,
            [1] * 7,
            [1] * 33,
            [5, 9],
            [1, 1, 5],
            [1, 33, 64, 1],
            [1, 1, 1, 17, 200],
            [100],
            [555, 500, 1, 1],
            [3] * 67,
            [1] * 66,
        )
    ):
        steps.mixed(counts, ASKED[number % len(ASKED)])
    new = Counter(launch.kernel.__name__ for launch in launches if launch.key() not in before)
    assert launches
    assert not new


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_launch_of_serving_compiles(name: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the very numbers and types of its launches, where a number that is 1 is a constant."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as 3.6 has it without being asked
    _, launches, _ = serve(name)
    for launch in {launch.key(): launch for launch in launches}.values():
        launch.compile()
