"""The memory that is planned for a plain checkpoint is what its weights take, however they are quantized on load."""

from pathlib import Path
from typing import get_args

import pytest
import torch
import transformers

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.load.architecture import describe_model
from troupellm.models.memory.weight_bytes import weight_bytes
from troupellm.models.memory.weight_count import weight_count
from troupellm.models.quantization.on_load import QUANTIZE, outline_on_load
from troupellm.protocol.config.setting_types import OnLoad
from troupellm.tests.support.engines.inside import parts_of
from troupellm.tests.support.kernels.held_memory import held_by
from troupellm.tests.support.quantized.quantized_llama import load

MODES: tuple[OnLoad, ...] = get_args(OnLoad)
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def write(folder: Path, name: str) -> Path:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=name == "tied")
    model: transformers.PreTrainedModel = transformers.LlamaForCausalLM(config)
    if name == "experts":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("name", ["apart", "tied", "experts"])
def test_what_is_planned_is_what_is_held(tmp_path: Path, name: str, mode: OnLoad | None, dtype: str) -> None:
    worker, seen = load(write(tmp_path, name), quantization=mode, dtype=dtype)
    planned = next(progress.total for progress in seen if progress.phase == "weights")
    held = held_by(parts_of(worker).decoder)
    assert held * 0.96 <= planned <= held * 1.05  # a router of four experts is padded to as many as it likes
    assert name == "experts" or held <= planned
    worker.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("columns", [256, 96, 80])
def test_what_a_mode_makes_is_known_before(mode: OnLoad, columns: int) -> None:
    weight = QUANTIZE[mode](torch.randn(48, columns))
    found = weight.outlines[0] if isinstance(weight, QuantizedWeight) else None
    assert outline_on_load(mode, 48, columns) == found


@pytest.mark.parametrize("name", ["apart", "experts"])
@pytest.mark.parametrize(("mode", "most"), [("int8", 0.56), ("int8-weight-only", 0.56), ("int4", 0.35), ("fp8", 0.56)])
def test_on_a_gpu_it_counts_in_codes_in_any_type(tmp_path: Path, name: str, mode: OnLoad, most: float) -> None:
    """Experts too, and whether or not the host has a compiler for the products of its own processor."""
    pytest.importorskip("triton")
    model = describe_model(write(tmp_path, name))
    tables = 2 * model.vocab_size * model.hidden_size
    for dtype in (torch.bfloat16, torch.float16):
        size = weight_bytes(model, dtype, torch.device("cuda"), mode)
        assert size <= 2 * tables + most * 2 * (weight_count(model) - tables)
