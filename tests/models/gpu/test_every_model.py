"""Every family of models and every format of weights is read onto a GPU and served there, and nothing mixes devices."""

from array import array
from collections.abc import Collection, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan, WorkerReady
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES, fresh_model
from troupellm.tests.support.gguf.gguf_llama import SIZES, Kind, Written
from troupellm.tests.support.gpu.gpu_worker import Gpu, absent_gpu_worker
from troupellm.tests.support.quantized.compressed_formats import SCHEMES, Writer
from troupellm.tests.support.quantized.float_formats import FORMATS
from troupellm.tests.support.quantized.packed_words import AWQ, GPTQ, GptqWriter, awq_writer
from troupellm.tests.support.quantized.quantized_llama import tiny_llama, write_model

pytest.importorskip("triton")
BLOCK, PER_ROW = 16, 4
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16", "block_size": BLOCK, "num_gpu_blocks_override": 40, "max_model_len": BLOCK * PER_ROW,
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "cudagraph_capture_sizes": (2,),
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = absent_gpu_worker(monkeypatch)
    yield found
    assert found.launches


def serve(folder: Path, **settings: Any) -> None:
    """Load a model, and take prompts in pieces, beside others, and then tokens one by one."""
    worker = ModelWorker(folder)
    ready = worker.load(EngineConfig.from_flat({"model": str(folder), **SETTINGS, **settings}), lambda progress: None)
    spans = ({0: (0, 13)}, {0: (13, 8), 1: (0, 20)}, *({0: (21 + step, 1), 1: (20 + step, 1)} for step in range(4)))
    tickets, tokens = [], 0
    for step, rows in enumerate(spans):
        plan = StepPlan(
            step=step,
            engine_epoch=0,
            rows=tuple(rows),
            epochs=(0,) * len(rows),
            starts=tuple(start for start, _ in rows.values()),
            counts=tuple(count for _, count in rows.values()),
            new_rows=tuple(new_row(row, ready) for row, (start, _) in rows.items() if start == 0),
        )
        tickets.append(worker.launch(plan))
        if len(tickets) == 2:
            tokens += len(worker.collect(tickets.pop(0)).tokens)
    tokens += sum(len(worker.collect(ticket).tokens) for ticket in tickets)
    worker.close()
    assert tokens == 10


def new_row(row: int, ready: WorkerReady) -> NewRow:
    count, groups = (21, 20)[row], len(ready.groups)
    blocks = tuple(
        tuple(range((row * groups + group) * PER_ROW, (row * groups + group + 1) * PER_ROW)) for group in range(groups)
    )
    return NewRow(
        row=row,
        epoch=0,
        request_id="",
        token_ids=array("i", range(count)).tobytes(),
        num_prompt_tokens=count,
        sampling=SamplingState(temperature=float(row), top_p=0.9),
        blocks=blocks,
    )


def write_family(folder: Path, name: str) -> Path:
    torch.manual_seed(5)
    fresh_model(FAMILIES[name](), torch.bfloat16).save_pretrained(folder)
    return folder


def cases(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Most of them are slow together."""
    every = ((name, name if isinstance(name, tuple) else (name,)) for name in names)
    return [pytest.param(*values, marks=() if name in quick else pytest.mark.slow) for name, values in every]


QUICK = ("gpt_oss", "deepseek_v2_lite")
"""Experts, sinks and windows, and latent vectors. The last test of this file serves a plain one."""


@pytest.mark.parametrize("name", cases(FAMILIES, QUICK))
def test_every_family_serves_on_a_gpu(tmp_path: Path, gpu: Gpu, name: str) -> None:
    serve(write_family(tmp_path, name))


ON_LOAD = {("llama_biases", "int8"), ("mixtral", "int4")}


@pytest.mark.parametrize(
    ("name", "mode"),
    cases(product(("llama_biases", "mixtral", "gpt_oss", "deepseek_v2"), ("int8", "fp8", "int4")), ON_LOAD),
)
def test_every_quantization_on_load(tmp_path: Path, gpu: Gpu, name: str, mode: str) -> None:
    serve(write_family(tmp_path, name), quantization=mode, kv_cache_dtype="fp8")


PACKED = {
    "gptq": GPTQ,
    "gptq_ordered": GPTQ | {"desc_act": True, "sym": False},
    "gptq_uneven": GPTQ | {"group_size": 48},
    "gptq_8": GPTQ | {"bits": 8},
    "awq": AWQ | {"modules_to_not_convert": ["v_proj", "gate"]},
}


def write_format(folder: Path, name: str) -> Path:
    if name in PACKED:
        return write_model(
            folder, tiny_llama(), awq_writer if name == "awq" else GptqWriter(PACKED[name]), PACKED[name]
        )
    if name in FORMATS:
        return write_model(folder, tiny_llama(), FORMATS[name][1], FORMATS[name][0])
    writer = Writer(name.removeprefix("compressed_"))
    return write_model(folder, tiny_llama(), writer, writer.config)


COMPRESSED = [f"compressed_{name}" for name in SCHEMES]
FAST = ("gptq_ordered", "fp8_channel", "compressed_w4a16")


@pytest.mark.parametrize("name", cases((*PACKED, *FORMATS, *COMPRESSED), FAST))
def test_every_quantized_format_serves_on_a_gpu(tmp_path: Path, gpu: Gpu, name: str) -> None:
    serve(write_format(tmp_path, name))


@pytest.mark.parametrize("kind", cases((Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q6_K, Kind.F16), (Kind.Q4_0, Kind.Q6_K)))
def test_every_kind_of_gguf(tmp_path: Path, gpu: Gpu, kind: Kind) -> None:
    path = tmp_path / "model.gguf"
    Written(path, transformers.LlamaConfig(**SIZES), {"": kind})
    serve(path)


def test_what_is_not_served_from_a_gpu_says_so(tmp_path: Path, gpu: Gpu) -> None:
    folder = write_family(tmp_path, "llama")
    with pytest.raises(ConfigError, match="does not go with model_impl transformers"):
        serve(folder, model_impl="transformers")
    serve(folder)
