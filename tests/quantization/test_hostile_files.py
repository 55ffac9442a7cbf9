"""Bad files do no harm: a refusal that names the fault, in little time and memory, for all bytes."""

import json
import os
import re
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from troupellm.models.config.gguf_documents import document
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.gguf_header import read_header
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import METHODS, read_format
from troupellm.models.quantization.layer_patterns import Names, safe_pattern
from troupellm.models.tokenizer.gguf_tokenizer import gguf_tokenizer
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.gguf.gguf_llama import SIZES, Kind, Written
from troupellm.tests.support.quantized.packed_words import AWQ, GPTQ, GptqWriter, awq_writer
from troupellm.tests.support.quantized.quantized_llama import load, save_sharded, tiny_llama, write_model

FUZZ = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    database=None,
)
HUGE = 2**62


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 64})
    return Written(tmp_path_factory.mktemp("gguf") / "tiny.gguf", config, {"": Kind.Q8_0}).path


def outcome(path: Path) -> str:
    """Everything that reads a header; only one kind of error may come out."""
    try:
        for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
            document(path, name)
        gguf_tokenizer(path)
    except ModelLoadError as error:
        return error.message
    return ""


@FUZZ
@given(data=st.data())
def test_a_file_with_changed_bytes_loads_or_is_refused(valid: Path, tmp_path: Path, data: st.DataObject) -> None:
    original = valid.read_bytes()
    header = original.index(b"token_embd.weight") + 400
    changed = bytearray(original)
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, header), st.integers(0, 255)), max_size=4)):
        changed[place] = byte
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, header)) :]
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    message = outcome(path)
    assert "\n" not in message
    assert str(tmp_path) not in message


def gguf_bytes(*, tensors: int = 0, entries: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + body


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(dimensions: tuple[int, ...] = (32,), kind: int = 8, offset: int = 0, name: bytes = b"t") -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


CRAFTED = {
    "empty": (b"", "is no GGUF file"),
    "other": (b"GGML" + bytes(20), "is no GGUF file"),
    "version": (gguf_bytes(version=1), "has version 1; versions 2 and 3 are read"),
    "endian": (gguf_bytes(version=3 << 24), "has big-endian numbers; little-endian ones are read"),
    "tensors": (gguf_bytes(tensors=HUGE), f"claims {HUGE} tensors"),
    "entries": (gguf_bytes(entries=HUGE), f"claims {HUGE} metadata entries"),
    "key": (gguf_bytes(entries=1, body=text(b"", HUGE)), f"is {HUGE} bytes long"),
    "text": (gguf_bytes(entries=1, body=text(b"k") + struct.pack("<I", 8) + text(b"", HUGE)), f"is {HUGE} bytes long"),
    "utf8": (gguf_bytes(entries=1, body=text(b"\xff")), "is not UTF-8"),
    "kind": (gguf_bytes(entries=1, body=text(b"k") + struct.pack("<I", 99)), "'k' has the unknown type 99"),
    "bool": (gguf_bytes(entries=1, body=text(b"k") + struct.pack("<IB", 7, 2)), "'k' must be true or false"),
    "numbers": (gguf_bytes(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, HUGE)), "ends within its header"),
    "texts": (gguf_bytes(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, HUGE)), "has more than 2097152 texts"),
    "flags": (gguf_bytes(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 7, HUGE)), "more than 2097152 texts and"),
    "nested": (gguf_bytes(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "'k' is an array of type 9"),
    "twice": (gguf_bytes(entries=2, body=(text(b"k") + struct.pack("<IB", 0, 1)) * 2), "has 'k' twice"),
    "alignment": (
        gguf_bytes(entries=1, body=text(b"general.alignment") + struct.pack("<II", 4, 0)),
        "general.alignment must be a multiple of 8",
    ),
    "dimensions": (gguf_bytes(tensors=1, body=tensor((1,) * 5)), "tensor t has 5 dimensions"),
    "none": (gguf_bytes(tensors=1, body=tensor((32, 0))), r"tensor t has shape \[0, 32\]"),
    "row": (gguf_bytes(tensors=1, body=tensor((33,))), "Q8_0 takes rows of 32"),
    "large": (gguf_bytes(tensors=1, body=tensor((2**40, 2**40))), "tensor t ends beyond the file"),
    "offset": (gguf_bytes(tensors=1, body=tensor(offset=HUGE)), "tensor t ends beyond the file"),
    "unaligned": (gguf_bytes(tensors=1, body=tensor(offset=1)), "tensor t begins at 1, which is not aligned to 32"),
    "again": (gguf_bytes(tensors=2, body=tensor() * 2) + bytes(200), "has tensor t twice"),
    "overlap": (gguf_bytes(tensors=2, body=tensor() + tensor(name=b"u")) + bytes(200), "tensors t and u overlap"),
    "unknown": (gguf_bytes(tensors=1, body=tensor(kind=77)), "tensor t has type 77, which has no name here"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_header_is_refused_by_its_fault(tmp_path: Path, name: str) -> None:
    data, message = CRAFTED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=f"^bad.gguf: .*{message}"):
        read_header(path)


def test_a_header_is_read_up_to_a_limit_however_long_its_file_is(tmp_path: Path) -> None:
    """A sparse file of any length takes no place on a disk."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf_bytes(entries=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, 2**34)))
    os.truncate(path, 2**40)
    with pytest.raises(ModelLoadError, match="^bad.gguf: has a header of more than 134217728 bytes"):
        read_header(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}},
}  # fmt: skip
INT8_WEIGHT = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True, "ch_axis": 0}
QUARK: dict[str, Any] = {
    "quant_method": "quark", "export": {"weight_format": "real_quantized"}, "exclude": [],
    "global_quant_config": {"weight": INT8_WEIGHT},
}  # fmt: skip
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CONFIGS = {"compressed-tensors": COMPRESSED, "quark": QUARK, "gptq": GPTQ, "awq": AWQ, "fp8": FP8,
           "mxfp4": {"quant_method": "mxfp4"},
           "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"},
           "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
           "auto-round": {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
                          "packing_format": "auto_round:auto_gptq",
                          "extra_config": {"lm_head": {"bits": 16}}}}  # fmt: skip


@FUZZ
@given(data=st.data())
def test_any_quantization_config_is_read_or_refused(data: st.DataObject) -> None:
    config = json.loads(json.dumps(CONFIGS[data.draw(st.sampled_from(sorted(METHODS)))]))
    home = config
    while True:
        key = data.draw(st.sampled_from(sorted(home)) | st.text(max_size=6))
        if isinstance(home.get(key), dict) and home[key] and data.draw(st.booleans()):
            home = home[key]
            continue
        home[key] = data.draw(JSON)
        break
    message = "quantization_config"
    try:
        assert read_format(ConfigReader({"quantization_config": config})) is not None
    except ModelLoadError as error:
        message = error.message
    assert "quantization_config" in message or "dynamic" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quantization_config.quant_method is missing"),
        ({"quant_method": "torchao"}, "quant_method must be one of compressed-tensors, gptq, awq, fp8"),
        (GPTQ | {"bits": 6}, "quantization_config.bits must be one of 2, 3, 4, 8, got 6"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2"),
        (GPTQ | {"rotation": "hadamard"}, "quantization_config.rotation is not supported"),
        (AWQ | {"version": "gemv"}, "quantization_config.version must be one of gemm"),
        (AWQ | {"bits": 8}, "quantization_config.bits must be 4"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size must be two integers of at least 1"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme must be one of dynamic, static"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format must be dense"),
        (COMPRESSED | {"transform_config": {"a": 1}}, "transform_config is not supported"),
        (COMPRESSED | {"format": "marlin-24"}, "quantization_config.format must be one of int-quantized"),
        (
            COMPRESSED | {"format": "nvfp4-pack-quantized"},
            'config_groups.group_0.weights.strategy must be one of tensor_group, got "group"',
        ),
        (
            COMPRESSED | {"ignore": ["re:(a+)+b"]},
            "quantization_config.ignore: the pattern '(a+)+b' could take too long",
        ),
        (COMPRESSED | {"config_groups": {"g": {"targets": ["Embedding"], "weights": {}}}}, "targets may name Linear"),
        (QUARK | {"global_quant_config": {"weight": {"dtype": "uint4"}}}, "weight.dtype must be one of fp8_e4m3, int8"),
        (QUARK | {"algo_config": [{"name": "quarot", "online_rotation_layers": [1]}]}, "without rotations at run time"),
        (QUARK | {"algo_config": {"name": "quarot", "r4": True}}, "without rotations at run time"),
        (QUARK | {"softmax_quant_spec": {"dtype": "fp8_e4m3"}}, "softmax_quant_spec is not supported"),
        (
            QUARK | {"layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}},
            "layer_quant_config.*k_proj.output_tensors must be null but for layers of kv_cache_group",
        ),
        (
            QUARK | {"global_quant_config": {"weight": INT8_WEIGHT | {"twice": 1}}},
            "weight.twice is not supported, got 1",
        ),
        (
            QUARK | {"global_quant_config": {"weight": INT8_WEIGHT | {"is_scale_quant": True}}},
            "global_quant_config.weight.is_scale_quant must be false",
        ),
        (QUARK | {"algo_config": 5}, "quantization_config.algo_config must be without rotations at run time, got 5"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_format(ConfigReader({"quantization_config": config}))
    assert message in caught.value.message


@pytest.mark.parametrize(
    "where",
    [
        {"export": {"weight_format": "real_quantized", "kv_cache_group": ["*k_proj"]}},
        {"kv_cache_group": ["*k_proj"]},
        {"kv_cache_quant_config": {"*k_proj": {}}},
    ],
)
@pytest.mark.parametrize("name", ["*k_proj", "model.layers.0.self_attn.k_proj"])
def test_what_goes_into_a_cache_is_the_caches_to_say(where: dict[str, Any], name: str) -> None:
    layers = {name: {"weight": INT8_WEIGHT, "output_tensors": {"dtype": "fp8_e4m3"}}}
    form = read_format(ConfigReader({"quantization_config": QUARK | where | {"layer_quant_config": layers}}))
    assert form is not None
    assert form.notes() == ("quark: calibrated scales of the KV cache are not used",)


LAYER = "model.layers.1.mlp.up_proj"


def dropped(key: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"{LAYER}.{key}")


def changed(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{key}": change(tensors[f"{LAYER}.{key}"]).contiguous()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "gptq": write_model(tmp_path_factory.mktemp("gptq"), tiny_llama(), GptqWriter(GPTQ), GPTQ),
        "awq": write_model(tmp_path_factory.mktemp("awq"), tiny_llama(), awq_writer, AWQ),
    }


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq", dropped("scales"), f"tensor {LAYER}.scales is missing"),
        ("gptq", dropped("qzeros"), f"tensor {LAYER}.qzeros is missing"),
        ("gptq", dropped("qweight"), f"tensor {LAYER}.weight is missing"),
        ("gptq", changed("qweight", lambda t: t[1:]), f"{LAYER}.qweight has shape [7, 128], expected [8, 128]"),
        ("gptq", changed("scales", lambda t: t.t()), f"{LAYER}.scales has shape [128, 2], expected [2, 128]"),
        ("gptq", changed("qweight", lambda t: t.float()), f"{LAYER}.qweight has type F32, expected one of I32"),
        ("gptq", changed("g_idx", lambda t: t + 9), f"{LAYER}: group names groups without a scale"),
        ("gptq", changed("g_idx", lambda t: t - 1), f"{LAYER}: group names groups without a scale"),
        ("gptq", changed("bias", lambda t: t + 1), f"tensor {LAYER}.bias is not zero"),
        ("awq", dropped("qzeros"), f"tensor {LAYER}.qzeros is missing"),
        ("awq", changed("qweight", lambda t: t[:, 1:]), f"{LAYER}.qweight has shape [64, 15], expected [64, 16]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, form: str, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = load_file(folders[form] / "model.safetensors")
    change(tensors)
    save_sharded(tmp_path, tensors)
    (tmp_path / "config.json").write_bytes((folders[form] / "config.json").read_bytes())
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert message in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    """96 inputs in groups of 40 have three scales, as in groups of 32: nothing else would show the difference."""
    layer = "model.layers.0.self_attn.q_proj"
    words, scales = torch.zeros(96, 12, dtype=torch.int32), torch.ones(96, 3)
    stored = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([96, 96])}
    save_sharded(tmp_path, {f"{layer}.{key}": tensor for key, tensor in stored.items()})
    for size, refused in ((32, False), (40, True)):
        config = json.loads(json.dumps(COMPRESSED))
        config["config_groups"]["group_0"]["weights"]["group_size"] = size
        form = read_format(ConfigReader({"quantization_config": config}))
        assert form is not None
        checkpoint = QuantizedCheckpoint(tmp_path, torch.float32, lambda _: None, form)
        wrong = pytest.raises(ModelLoadError, match=rf"{layer}: \[96, 96\] does not fit groups of 40 inputs")
        with wrong if refused else nullcontext():
            checkpoint.linear(layer, (96, 96))


def test_a_quantized_checkpoint_is_not_quantized_again(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="quantization must be int8"):
        load(folders["gptq"], quantization="fp8")


@pytest.mark.parametrize("pattern", [r".*lm_head", r".*self_attn.*_proj", r"model\.layers\.(?:[0-9]|1[0-9])\.mlp\..*$",
                                     r".*\.experts\.\d+\.(gate|up)_proj$", r"^(?!.*mlp).*", r"a{2,3}b",
                                     r"(?:language_model\.|model\.)?layers?\.3\.(?:mlp|self_attn)\.[a-z]*?.*",
                                     r"model\.layers\.(?:" + "|".join(map(str, range(60))) + r")\.(?:mlp|self_attn)\.",
                                     r".*\.(?:" + "|".join(map(str, range(60))) + r")\..*\.(?:gate|up|down)_proj$",
                                     r".*model.*layers.*mlp.*experts.*(?:gate|up|down)_proj",
                                     ])  # fmt: skip
def test_a_usual_pattern_matches_as_in_python(pattern: str) -> None:
    name = "model.layers.3.mlp.experts.12.up_proj"
    assert bool(safe_pattern(pattern, "ignore").match(name)) == bool(re.match(pattern, name))


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*$", r"(.*a){20}", r".*.*.*.*.*.*x", r"(?P<n>a)(?P=n)",
                                     r"((a)*b)*", r"x" * 600, r"(a*){3}", r"(?:a?b*)+c",
                                     ".?" * 40 + "!", "(?:.?){40}!", "(?:a?){9}",
                                     r"(?:.|[a-z.])" * 40 + "!",
                                     r"(?:.|[a-z.])" * 16 + ".*.*.*.*.*!",
                                     r"(?:.|[a-z.])" * 3 + ".*.*.*.*.*!", r".*\w.*\w.*\w.*\w.*!"])  # fmt: skip
def test_patterns_that_could_take_long_are_refused(pattern: str) -> None:
    with pytest.raises(ModelLoadError, match="could take too long"):
        safe_pattern(pattern, "ignore")


def test_a_list_of_names_matches_names_and_patterns() -> None:
    names = Names(["lm_head", "re:model\\.layers\\.[01]\\.", "*down_proj"], "exclude", wildcards=True)
    assert "lm_head" in names
    assert "model.layers.1.mlp.up_proj" in names
    assert "model.layers.2.mlp.down_proj" in names
    assert "model.layers.2.mlp.up_proj" not in names
    with pytest.raises(ModelLoadError, match="is no regular expression"):
        Names(["re:["], "exclude")


def test_a_layer_of_nothing_but_ones_is_no_overflow() -> None:
    """The largest exponents make infinities, which are values, not errors."""
    from troupellm.models.quantization.fp8 import numbers

    assert numbers(torch.tensor([[0, 127, 254, 255]], dtype=torch.uint8)).tolist()[0][1:3] == [1.0, 2.0**127]
