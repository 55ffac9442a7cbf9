"""An encoder of `transformers` in the place of our own: whole prompts in, their last hidden states out."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from troupellm.models.config.encoder_config import BY_TRANSFORMERS, OTHER_ENCODERS, EncoderConfig
from troupellm.models.config.hf_config import FILE, ConfigReader, architecture_of
from troupellm.models.config.pooling_config import classifier_activation, read_labels
from troupellm.models.config.transformers_package import INSTALL, has_transformers
from troupellm.models.layers.encoder import EncoderBatch, Head
from troupellm.models.transformers_backend.describe import hf_config
from troupellm.models.transformers_backend.pretrained import load_pretrained, refuse_tensors
from troupellm.protocol.errors import ModelLoadError

POOLER = "pooler."
"""A part of bodies that was made for training; our own pooler takes its place."""


def describe_other_encoder(folder: Path, reader: ConfigReader) -> EncoderConfig:
    """Describe an encoder that `transformers` runs.

    Raises:
        ModelLoadError: the package is missing, config.json cannot be read, or asks for a feature that is not built.
    """
    architecture = architecture_of(reader)
    if not has_transformers():
        raise ModelLoadError(f"{architecture} needs the package transformers", hint=INSTALL)
    if reader.has("quantization_config"):
        raise ModelLoadError(f"{FILE}: quantization_config: quantized encoders are not supported")
    config = hf_config(folder)
    kind = OTHER_ENCODERS.get(architecture, "Model")
    labels = read_labels(reader) if kind == "ForSequenceClassification" else ()
    with torch.device("meta"):
        body = _class(architecture)._from_config(config)
    return EncoderConfig(
        architecture=architecture,
        family=BY_TRANSFORMERS,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        num_layers=int(config.num_hidden_layers),
        num_heads=int(config.num_attention_heads),
        layer_norm_eps=1e-12,
        hidden_act="",
        type_vocab_size=0,
        num_positions=int(config.max_position_embeddings),
        position_offset=0,
        pad_token_id=None,
        labels=labels,
        activation=classifier_activation(reader, len(labels)) if labels else "softmax",
        masked_lm=kind == "ForMaskedLM",
        pooling_type="MEAN" if getattr(config, "classifier_pooling", "cls") == "mean" else "CLS",
        num_parameters=sum(parameter.numel() for parameter in body.parameters()),
    )


class TransformersEncoder:
    """A model ready to run, by the calls of `models.layers.encoder.Encoder`."""

    def __init__(self, config: EncoderConfig, model: Any) -> None:
        """model: of `transformers`, with its weights."""
        self.config, self._model = config, model
        self._body = model.base_model  # the model itself where it has no head

    @property
    def head(self) -> Head | None:
        """The classifier on a pooled hidden state [rows, hidden]; None without one."""
        return self._classify if self.config.labels else None

    def forward(self, batch: EncoderBatch) -> Tensor:
        """As `Encoder.forward`."""
        ids = batch.token_ids[batch.places]
        mask = torch.ones_like(ids, dtype=torch.bool) if batch.mask is None else batch.mask
        states: Tensor = self._body(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return states[mask]

    def _classify(self, pooled: Tensor) -> Tensor:
        logits: Tensor = self._model.classifier(self._model.head(pooled.to(self._model.dtype)))
        return logits


def read_encoder(folder: Path, config: EncoderConfig, dtype: torch.dtype, *, dummy: bool, seed: int) -> Any:
    """The model with its weights, from safetensors alone.

    Args:
        dummy: random weights instead, by `seed`.

    Raises:
        ModelLoadError: a file is missing or damaged, or does not hold what the model needs, no more and no less.
    """
    kind, settings = _class(config.architecture), hf_config(folder)
    if dummy:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind._from_config(settings, dtype=dtype).eval()
    model, unexpected = load_pretrained(kind, folder, settings, dtype, spared=POOLER)
    refuse_tensors("unexpected", [name for name in unexpected if not name.startswith(POOLER)])
    return model.eval()


def _class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)
