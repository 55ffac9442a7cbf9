"""Every architecture of GGUF files: a tiny model, written as the converter writes it, gives the log-probabilities and
tokens of transformers."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from troupellm.models.config.gguf_architectures import ARCHITECTURES
from troupellm.models.config.gguf_config import model_config
from troupellm.models.config.gguf_metadata import EMBEDDING
from troupellm.models.hub.gguf_header import Header, StoredTensor, read_header
from troupellm.models.layers.decoder import Decoder
from troupellm.models.tokenizer.served import check_fit
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.logprob_check import ROUNDED, TOLERANCE, check_logprobs
from troupellm.tests.support.engines.inside import parts_of
from troupellm.tests.support.gguf.gguf_converter import write
from troupellm.tests.support.gguf.gguf_families import FAMILIES, SHORT, Family
from troupellm.tests.support.gguf.gguf_llama import SPECIAL, Kind, add_byte_level, byte_level
from troupellm.tests.support.kernels.held_memory import held_by
from troupellm.tests.support.quantized.quantized_llama import load

ONE_TABLE = {"disable_hybrid_kv_cache_manager": True}
"""All layers share a block table, which the plans here are written for."""
DEEP = ("gemma2 of 46 layers", "gemma3 of 62 layers")
Read = Callable[[str], Header]


def written(path: Path, family: Family, kind: Kind = Kind.Q8_0, **more: Kind) -> PreTrainedModel:
    return write(path, family.converter, family.make(), kind, family.extra, **more)


def params() -> list[object]:
    """Packed weights in `make test`, plain ones beside them in `make test-all`."""
    return [
        pytest.param(name, kind, id=f"{name}-{kind.name}", marks=pytest.mark.slow if plain or name in DEEP else ())
        for name in FAMILIES
        for kind, plain in ((Kind.Q8_0, False), (Kind.F32, True))
    ]


@pytest.mark.parametrize(("name", "kind"), params())
def test_logprobs_and_tokens_are_those_of_transformers(tmp_path: Path, name: str, kind: Kind) -> None:
    model = written(tmp_path / "tiny.gguf", FAMILIES[name], kind)
    worker, seen = load(tmp_path / "tiny.gguf", **ONE_TABLE)
    planned, decoder = (
        next(progress.total for progress in seen if progress.phase == "weights"),
        parts_of(worker).decoder,
    )
    assert not isinstance(decoder, Decoder) or held_by(decoder) <= planned
    check_logprobs(worker, model, ROUNDED if kind is Kind.Q8_0 else TOLERANCE)
    worker.close()


def test_every_architecture_has_a_family_here() -> None:
    names = {gguf.MODEL_ARCH_NAMES[family.converter.arch] for family in FAMILIES.values()}
    assert names == ARCHITECTURES.keys()


def test_short_contexts_take_the_short_factors(tmp_path: Path) -> None:
    model = written(tmp_path / "tiny.gguf", SHORT)
    worker, _ = load(tmp_path / "tiny.gguf", max_model_len=64, **ONE_TABLE)
    check_logprobs(worker, model)
    worker.close()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_experts_in_four_bits_stay_packed(tmp_path: Path) -> None:
    """As gpt-oss is published: its experts in MXFP4, one tensor for gate and one for up."""
    model = written(tmp_path / "tiny.gguf", FAMILIES["gpt-oss"], experts=Kind.MXFP4)
    worker, seen = load(tmp_path / "tiny.gguf", **ONE_TABLE)
    check_logprobs(worker, model)
    assert "products: 31 gguf, 3 plain" in [progress.detail for progress in seen]  # three routers
    worker.close()


@pytest.mark.parametrize(
    ("architecture", "layers", "expected"),
    [("gemma2", 46, 16), ("gemma2", 42, 32), ("gemma3", 62, 16), ("gemma3", 48, 32)],
)
def test_one_size_of_gemma_scales_its_scores_otherwise(architecture: str, layers: int, expected: int) -> None:
    keys = {
        "block_count": layers,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in keys.items()}}
    names = [EMBEDDING, *(f"blk.{layer}.attn_q.weight" for layer in range(layers))]
    tensors = {name: StoredTensor("F32", (8, 64), Path("a.gguf"), 0, 0) for name in names}
    assert model_config(Header("a.gguf", metadata, tensors))["query_pre_attn_scalar"] == expected


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Read:
    folder = tmp_path_factory.mktemp("headers")

    def read(name: str) -> Header:
        path = folder / f"{name}.gguf"
        if not path.exists():
            written(path, FAMILIES[name])
        return read_header(path)

    return read


REFUSED = [
    ("llama", "attention.scale", 0.3, "is not supported, got 0.3"),
    ("llama", "attention.sliding_window_pattern", [True, False], "is not supported"),
    ("qwen3", "embedding_length", 2**30, "must be 64, the columns of token_embd.weight, got 1073741824"),
    ("qwen3", "feed_forward_length", 2**30, "must be 96, the columns of blk.0.ffn_down.weight, got 1073741824"),
    ("qwen3", "pooling_type", 3, "is not supported, got 3"),
    ("gemma3", "attn_logit_softcapping", 50.0, "is not supported, got 50.0"),
    ("gemma2", "attention.sliding_window_pattern", [True], "must be an array of 3 flags"),
    ("granite", "rope.scaling.finetuned", False, "must be true: without rotation the model is not supported"),
    ("granite", "expert_count", 2, "is not supported, got 2"),
    ("glm4", "rope.dimension_sections", [8, 12, 12, 0], "is not supported"),
    ("glm4", "nextn_predict_layers", 2, r"must be below block_count \(2\)"),
    ("olmo2", "rope.scaling.yarn_ext_factor", 0.5, "is not supported"),
    ("qwen2 with yarn", "rope.scaling.yarn_attn_factor", 0.7, "must be 1.0000 or 1.1386"),
    ("deepseek2", "attention.value_length", 48, "must be 32"),
    ("deepseek2", "expert_gating_func", 3, r"must be 1 \(softmax\) or 2 \(sigmoid\)"),
    ("minimax-m2", "expert_gating_func", 1, r"must be 2 \(sigmoid\)"),
    ("qwen3moe", "expert_shared_count", 1, "is not supported"),
    ("lfm2", "attention.head_count_kv", [0, 2], "must be an array of 3 whole numbers"),
    ("lfm2", "attention.head_count_kv", [0, 2, 4], "must hold one number beside 0"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), REFUSED, ids=[f"{row[0]}-{row[1]}" for row in REFUSED])
def test_a_key_that_is_not_read_is_refused_by_name(
    header: Read, name: str, key: str, value: object, message: str
) -> None:
    found = header(name)
    prefix = gguf.MODEL_ARCH_NAMES[FAMILIES[name].converter.arch]
    with pytest.raises(ModelLoadError, match=rf"^{name}\.gguf: {prefix}\.{key} {message}"):
        model_config(found._replace(metadata=found.metadata | {f"{prefix}.{key}": value}))
    off = {f"{prefix}.made_up": 0, f"{prefix}.attention.causal": True}
    assert model_config(found._replace(metadata=found.metadata | off)) == model_config(found)


def test_sizes_of_tensors_that_are_stored_are_refused(header: Read) -> None:
    found, key = header("granite"), "granite.ssm.conv_kernel"
    stored = found.tensors | {"blk.0.ssm_conv1d.weight": found.tensors[EMBEDDING]}
    with pytest.raises(ModelLoadError, match=rf"^granite.gguf: {key} is not supported, got 4$"):
        model_config(found._replace(metadata=found.metadata | {key: 4}, tensors=stored))


@pytest.mark.parametrize("name", ["lfm2moe", "granitehybrid", "qwen3next", "qwen35", "made-up"])
def test_another_architecture_is_refused_with_those_that_are_read(header: Read, name: str) -> None:
    found = header("llama")
    with pytest.raises(ModelLoadError, match=rf'^llama.gguf: general.architecture must be one of llama, .*"{name}"$'):
        model_config(found._replace(metadata={"general.architecture": name}))


def test_the_part_that_sees_images_is_refused_as_a_model(header: Read) -> None:
    found = header("llama")
    with pytest.raises(ModelLoadError, match="general.architecture clip is the part of a model that sees") as caught:
        model_config(found._replace(metadata={"general.architecture": "clip"}))
    assert caught.value.hint == "give the GGUF file of the model itself"


def drafting_layer(writer: gguf.GGUFWriter) -> None:
    """One more layer, which drafts further tokens, behind the two of the model."""
    writer.add_block_count(3)
    writer.add_nextn_predict_layers(1)
    for name in ("nextn.eh_proj", "nextn.enorm", "attn_norm", "attn_q"):
        writer.add_tensor(f"blk.2.{name}.weight", np.ones((4, 4), dtype=np.float32))


def test_layers_that_draft_are_left_out_with_a_note(tmp_path: Path) -> None:
    model = written(tmp_path / "tiny.gguf", FAMILIES["glm4"]._replace(extra=drafting_layer))
    worker, seen = load(tmp_path / "tiny.gguf", **ONE_TABLE)
    check_logprobs(worker, model)
    worker.close()
    notes = [progress.detail for progress in seen if "multi-token prediction" in progress.detail]
    assert notes == ["4 tensors for multi-token prediction are left out, such as blk.2.nextn.eh_proj.weight"]


def test_a_model_of_transformers_says_that_its_weights_are_expanded(tmp_path: Path) -> None:
    written(tmp_path / "tiny.gguf", FAMILIES["hunyuan-dense"])
    worker, seen = load(tmp_path / "tiny.gguf", **ONE_TABLE)
    assert any("so that its weights are expanded" in progress.detail for progress in seen)
    worker.close()


def more_tokens(writer: gguf.GGUFWriter) -> None:
    add_byte_level(writer, byte_level((*SPECIAL, "<|first|>", "<|second|>")), "gpt-2")


def test_tokens_without_a_row_in_the_embedding_are_refused_by_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    rows = written(path, FAMILIES["qwen3"]._replace(extra=more_tokens)).config.vocab_size
    message = rf"^tiny.gguf: token '<\|first\|>' has the id {rows} and 1 more have greater ones, but .* has {rows} rows"
    with pytest.raises(ModelLoadError, match=message):
        check_fit(Tokenizer.load(path), path, path, None)


def without_experts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(5)


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    written(tmp_path / "tiny.gguf", FAMILIES["qwen3moe"]._replace(extra=without_experts))
    with pytest.raises(ModelLoadError, match=r"blk.0.ffn_gate_inp.weight has shape \[4, 64\], expected \[5, 64\]$"):
        load(tmp_path / "tiny.gguf", **ONE_TABLE)
