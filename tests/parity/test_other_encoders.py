"""Encoders that the code of `transformers` runs give its own vectors, alone and in a crowd of any lengths."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.worker.load_encoder import LoadedEncoder
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import StepPlan
from troupellm.protocol.params.pooling import PoolingParams, PoolingState
from troupellm.tests.support.checkpoints import tiny_encoder
from troupellm.tests.support.checkpoints.encoder_rows import new_row, prompts, vectors_of

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": tiny_encoder.VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 96, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODERN: dict[str, Any] = {
    **SIZES, "global_attn_every_n_layers": 3, "local_attention": 16, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3TextModel": (
        "Gemma3TextConfig",
        {
            **SIZES,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "use_bidirectional_attention": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "EuroBertModel": ("EuroBertConfig", {**SIZES, "num_key_value_heads": 4}),
    "GteModel": ("GteConfig", SIZES),
    "JinaEmbeddingsV3Model": ("JinaEmbeddingsV3Config", SIZES),
    "ModernBertModel": ("ModernBertConfig", MODERN),
    "ModernBertForMaskedLM": ("ModernBertConfig", MODERN),
    "NomicBertModel": ("NomicBertConfig", SIZES),
}


def write(folder: Path, architecture: str, config: str, values: dict[str, Any]) -> transformers.PreTrainedModel:
    def make() -> transformers.PreTrainedModel:
        return getattr(transformers, architecture)(getattr(transformers, config)(**values))

    return tiny_encoder.write_encoder(folder, make, pooling="mean_tokens")


def load(folder: Path, **settings: object) -> LoadedEncoder:
    config = EngineConfig.from_flat({"model": str(folder), **settings})
    return LoadedEncoder(folder, ConfigReader.load(folder), config, torch.float32, lambda _: None)


def run(loaded: LoadedEncoder, texts: list[list[int]], state: PoolingState) -> list[np.ndarray]:
    rows, counts = tuple(range(len(texts))), tuple(map(len, texts))
    new = tuple(new_row(row, texts[row], state) for row in rows)
    zeros = (0,) * len(rows)
    plan = StepPlan(step=0, engine_epoch=0, rows=rows, epochs=zeros, starts=zeros, counts=counts, new_rows=new)
    return vectors_of(loaded.fresh_runner().run(plan))


@pytest.mark.parametrize("architecture", ENCODERS)
def test_embeddings_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = write(tmp_path, architecture, *ENCODERS[architecture])
    loaded = load(tmp_path)
    ability = loaded.ready(0.0).pooling
    assert ability is not None
    assert ability.pooling_type == "MEAN"
    plain, texts = ability.resolve(PoolingParams(use_activation=False)), prompts(tiny_encoder.VOCABULARY, least=5)
    for text, got in zip(texts, run(loaded, texts, plain), strict=True):
        with torch.inference_mode():
            states = model.base_model(torch.tensor([text]), attention_mask=torch.ones(1, len(text))).last_hidden_state
        np.testing.assert_allclose(got, states[0].mean(dim=0).numpy(), atol=TOLERANCE)
        (alone,) = run(loaded, [text], plain)
        np.testing.assert_allclose(alone, got, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers_are_those_of_transformers(labels: int, pooling: str, tmp_path: Path) -> None:
    values = {**MODERN, "num_labels": labels, "classifier_pooling": pooling}
    model = write(tmp_path, "ModernBertForSequenceClassification", "ModernBertConfig", values)
    loaded = load(tmp_path)
    ability = loaded.ready(0.0).pooling
    assert ability is not None
    assert ability.tasks == (("score", "classify") if labels == 1 else ("classify",))
    texts = prompts(tiny_encoder.VOCABULARY, least=5)
    for text, got in zip(texts, run(loaded, texts, ability.resolve(PoolingParams())), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0]
        expected = logits.sigmoid() if labels == 1 else logits.softmax(dim=0)
        np.testing.assert_allclose(got, expected.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("activation", ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"])
def test_layers_behind_the_pooling_are_applied(activation: str, tmp_path: Path) -> None:
    """As EmbeddingGemma has them: two, before the length is set to one."""
    model = write(tmp_path, "Gemma3TextModel", *ENCODERS["Gemma3TextModel"])
    weights = write_dense(tmp_path, activation, (48, 64, 32))
    loaded = load(tmp_path)
    ability = loaded.ready(0.0).pooling
    assert ability is not None
    assert ability.hidden_size == 32
    texts = prompts(tiny_encoder.VOCABULARY, least=5)
    for text, got in zip(texts, run(loaded, texts, ability.resolve(PoolingParams())), strict=True):
        with torch.inference_mode():
            state = (
                model(torch.tensor([text]), attention_mask=torch.ones(1, len(text))).last_hidden_state[0].mean(dim=0)
            )
        for weight in weights:
            state = weight @ state
            state = state.tanh() if activation.endswith("Tanh") else state
        np.testing.assert_allclose(got, torch.nn.functional.normalize(state, dim=0).numpy(), atol=TOLERANCE)


def write_dense(folder: Path, activation: str, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """sentence-transformers' modules, put before the last one; their weights."""
    listed, weights = json.loads((folder / "modules.json").read_text()), []
    torch.manual_seed(3)
    for place, (inner, outer) in enumerate(pairwise(sizes), start=2):
        home = folder / f"{place}_Dense"
        home.mkdir()
        weights.append(torch.randn(outer, inner) / 8)
        save_file({"linear.weight": weights[-1]}, home / "model.safetensors")
        values = {"in_features": inner, "out_features": outer, "bias": False, "activation_function": activation}
        (home / "config.json").write_text(json.dumps(values))
        listed.insert(
            place, {"idx": place, "name": "", "path": home.name, "type": "sentence_transformers.models.Dense"}
        )
    (folder / "modules.json").write_text(json.dumps(listed))
    return weights


@pytest.mark.parametrize(
    ("activation", "sizes", "message"),
    [
        ("torch.nn.ReLU", (48, 32), "2_Dense/config.json: activation_function must be Identity or Tanh"),
        ("torch.nn.Tanh", (40, 32), "2_Dense: in_features is 40, but 48 come in"),
    ],
)
def test_other_layers_are_refused(activation: str, sizes: tuple[int, ...], message: str, tmp_path: Path) -> None:
    write(tmp_path, "NomicBertModel", *ENCODERS["NomicBertModel"])
    write_dense(tmp_path, activation, sizes)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_random_weights_and_limits(tmp_path: Path) -> None:
    write(tmp_path, "ModernBertModel", *ENCODERS["ModernBertModel"])
    (tmp_path / "model.safetensors").unlink()
    ready = load(tmp_path, load_format="dummy").ready(0.0)
    assert ready.max_model_len == 96
    assert not ready.generates


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one", "ModernBertModel", *ENCODERS["ModernBertModel"])
    write(tmp_path / "other", "ModernBertModel", "ModernBertConfig", {**MODERN, "vocab_size": 90})
    (tmp_path / "other" / "config.json").write_bytes((tmp_path / "one" / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match="mismatched tensor embeddings"):
        load(tmp_path / "other")
