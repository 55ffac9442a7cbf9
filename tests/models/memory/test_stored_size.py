"""The memory of a loaded quantized checkpoint, in codes or dequantized, and no more."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from troupellm.kernels.quantized_linear import Int8Channel
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.gguf.sizes import tensors_bytes
from troupellm.models.hub.gguf_header import StoredTensor
from troupellm.models.memory.plan import plan_memory
from troupellm.models.memory.stored_size import StoredSize, stored_size
from troupellm.models.memory.weight_count import weight_count
from troupellm.models.quantization.formats import read_format
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.tests.support.engines.inside import parts_of
from troupellm.tests.support.gguf.gguf_llama import SIZES, Kind, Written
from troupellm.tests.support.kernels.held_memory import held_by
from troupellm.tests.support.quantized.packed_words import GPTQ, GptqWriter
from troupellm.tests.support.quantized.quantized_llama import load, tiny_llama, write_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPES = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
MXFP4 = {
    "quant_method": "quark", "exclude": ["lm_head"],
    "global_quant_config": {"weight": {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}},
}  # fmt: skip


def fp8(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}, weight


def int8(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found = Int8Channel.quantize(weight)
    return {"weight": found.values, "weight_scale": found.scale[:, None]}, weight


def mxfp4(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return {"weight": codes, "weight_scale": torch.full((rows, columns // 32), 120, dtype=torch.uint8)}, weight


GGUF = {
    "plain": {"attn_v": Kind.F16, "ffn_up": Kind.BF16},
    "mixed": {"attn_v": Kind.Q5_1, "attn_k": Kind.IQ3_S, "ffn_up": Kind.Q2_K, "token_embd": Kind.Q5_K},
}
"""Products of parts that differ; plain parts have the others dequantized."""
STORES = {"fp8": (fp8, FP8), "compressed-tensors": (int8, INT8), "quark": (mxfp4, MXFP4)}


def write(folder: Path, name: str) -> Path:
    """name: of the method, and what is special."""
    method, _, special = name.partition("_")
    if method == "gguf":
        config = LlamaConfig(**SIZES | {"num_hidden_layers": 3}, tie_word_embeddings=special == "tied")
        return Written(folder / "a.gguf", config, {"": Kind.Q4_K, "ffn_down": Kind.Q6_K} | GGUF.get(special, {})).path
    model = tiny_llama(**SHAPES)
    if method == "gptq":
        config = GPTQ | ({"desc_act": True} if special == "ordered" else {})
        return write_model(folder, model, GptqWriter(config), config)
    return write_model(folder, model, *STORES[method])


def sized(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[DecoderConfig, StoredSize]:
    reader = ConfigReader.load(path)
    model = describe_decoder(reader)
    size = stored_size(path, model, read_format(reader), dtype, device)
    assert size is not None
    return model, size


NAMES = ("gptq", "gguf", "gguf_tied", "gguf_plain", "gguf_mixed", *STORES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_planned_is_what_is_held(tmp_path: Path, name: str, dtype: str) -> None:
    path = write(tmp_path, name)
    _, size = sized(path, getattr(torch, dtype), CPU)
    assert size.method == name.partition("_")[0]
    worker, seen = load(path, dtype=dtype)
    planned = next(progress for progress in seen if progress.phase == "weights")
    assert planned.total == size.nbytes
    assert size.method in planned.detail
    held = held_by(parts_of(worker).decoder)
    assert held <= size.nbytes < 1.12 * held
    worker.close()


def test_nothing_is_told_of_a_plain_checkpoint(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert stored_size(tmp_path, describe_decoder(ConfigReader.load(tmp_path)), None, torch.float32, CPU) is None


STAY_ON_A_GPU = {"gptq": 0.38, "gptq_ordered": 0.41, "fp8": 0.55, "compressed-tensors": 0.55, "gguf": 0.45}
"""Most memory of the products, as a part of that of dequantized weights."""


@pytest.mark.parametrize("name", [*STAY_ON_A_GPU, "quark"])
def test_codes_that_stay_on_a_gpu_count_as_codes(tmp_path: Path, name: str) -> None:
    """For every dtype of the computation, a model that fits in its codes alone is not refused."""
    pytest.importorskip("triton")
    model, size = sized(write(tmp_path, name), torch.bfloat16, GPU)
    full, tables = 2 * weight_count(model), 2 * 2 * model.vocab_size * model.hidden_size
    if name == "quark":  # MXFP4 outside of experts, which has no product there
        assert size.nbytes == full
        return
    assert size.nbytes - tables <= STAY_ON_A_GPU[name] * (full - tables)
    config = EngineConfig.from_flat({"max_model_len": 32, "max_num_batched_tokens": 32, "max_num_seqs": 1})

    def fits(stored: StoredSize) -> bool:
        try:
            plan_memory(model, config, torch.bfloat16, full, stored, device=GPU, on_gpu=True)
        except ConfigError:
            return False
        return True

    assert fits(size)
    assert not fits(StoredSize("dequantized", full))


def test_experts_of_a_gguf_file_count_as_they_are_held() -> None:
    """A GPU stacks experts, gate and up as one, which keeps their blocks where both are of one type."""
    pytest.importorskip("triton")

    def size(device: torch.device, **types: str) -> int:
        tensors = {
            f"blk.0.ffn_{part}_exps.weight": StoredTensor(kind, (8, 512, 256), Path(), 0, 0)
            for part, kind in types.items()
        }
        return tensors_bytes(tensors, (), torch.float32 if device == CPU else torch.bfloat16, device)

    weights = 8 * 512 * 256
    if shutil.which("g++") is not None:
        assert size(CPU, gate="Q4_K", up="Q6_K", down="Q5_K") == weights * (4.625 + 6.5625 + 5.625) / 8
    assert size(CPU, gate="Q4_K", up="F16") == 2 * 4 * weights
    assert size(GPU, gate="Q4_K", up="Q4_K") == 2 * weights * 6 / 8
    assert size(GPU, gate="Q4_K", up="Q6_K") == 2 * 2 * weights
    assert size(GPU, gate="MXFP4", up="MXFP4") == 2 * weights * 4.25 / 8
    assert size(GPU, down="IQ4_XS") == 2 * weights


def test_experts_in_mxfp4_count_as_they_are_stored(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        max_position_embeddings=128,
    )
    model = transformers.GptOssForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            tensors[f"{name}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 127, dtype=torch.uint8)
        else:
            tensors[name] = tensor
    save_file(tensors, file)
    reader = ConfigReader.load(tmp_path)
    form = read_format(ConfigReader({"quantization_config": {"quant_method": "mxfp4"}}))
    described = describe_decoder(reader)
    on_gpu = stored_size(tmp_path, described, form, torch.bfloat16, GPU)
    assert on_gpu == ("mxfp4", sum(tensor.nbytes for tensor in tensors.values()))
    on_cpu = stored_size(tmp_path, described, form, torch.bfloat16, CPU)
    assert on_cpu == ("mxfp4", 2 * weight_count(described))
