"""The encoder skeleton of BERT, RoBERTa and DistilBERT: embeddings, layers, and a classifier where there is one.

Prompts of one batch lie one after the other without padding; only inside the attention they are put side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.linear import best_rows, linear, pack
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.encoder_config import BERT, DISTILBERT, ROBERTA, EncoderConfig
from troupellm.models.layers.projections import merged_linear

_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
_LAYER_NAMES = {
    # prefix of a layer, then its parts: query, key, value, output, norm, up, down, norm
    BERT: (
        "encoder.layer", "attention.self.query", "attention.self.key", "attention.self.value",
        "attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense",
        "output.LayerNorm",
    ),
    DISTILBERT: (
        "transformer.layer", "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin",
        "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm",
    ),
}  # fmt: skip
_LAYER_NAMES[ROBERTA] = _LAYER_NAMES[BERT]


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """Whole prompts, one after the other."""

    token_ids: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]: rows of the position table."""
    types: Tensor
    """int64 [tokens]: 0, or 1 for a pair's second text."""
    places: Tensor
    """int64 [prompts, longest]: the place of each token of each prompt; places behind its end repeat its first
    token."""
    mask: Tensor | None
    """bool [prompts, longest]: which of those are tokens; None where all are."""


Head = Callable[[Tensor], Tensor]
"""A classifier: pooled hidden states [rows, hidden] to logits [rows, labels]."""


class RunnableEncoder(Protocol):
    """The part of an encoder that the runner needs; models of `transformers` implement it, too."""

    config: EncoderConfig

    @property
    def head(self) -> Head | None:
        """None if the model embeds."""

    def forward(self, batch: EncoderBatch) -> Tensor:
        """As `Encoder.forward`."""


class Norm:
    """Layer normalization with a gain and a bias, which checkpoints of TensorFlow's time call gamma and beta."""

    def __init__(self, name: str, config: EncoderConfig, source: WeightSource) -> None:
        size = (config.hidden_size,)
        self.weight, self.bias = (
            source.take(f"{name}.{newer if source.has(f'{name}.{newer}') else older}", size)
            for newer, older in (("weight", "gamma"), ("bias", "beta"))
        )
        self.size, self.eps = size, config.layer_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.size, self.weight, self.bias, self.eps)


class EncoderLayer:
    """Attention and feed-forward, each with its norm behind the residual."""

    def __init__(self, config: EncoderConfig, layer: int, prefix: str, source: WeightSource) -> None:
        home, *names = _LAYER_NAMES[config.family]
        query, key, value, output, norm, up, down, last_norm = (f"{prefix}{home}.{layer}.{name}" for name in names)
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.act = _ACTS[config.hidden_act]
        self.qkv = merged_linear(source, (query, key, value), (size, size, size), size, bias=True)
        self.out = merged_linear(source, (output,), (size,), size, bias=True)
        self.attention_norm = Norm(norm, config, source)
        self.up = merged_linear(source, (up,), (inner,), size, bias=True)
        self.down = merged_linear(source, (down,), (size,), inner, bias=True)
        self.norm = Norm(last_norm, config, source)

    def __call__(self, hidden: Tensor, batch: EncoderBatch, tokens: Tensor, lined_up: Tensor) -> Tensor:
        """[rows, hidden] to [rows, hidden]; see `Encoder.forward` for the rest."""
        attended = linear(self._attend(linear(hidden, self.qkv), batch, tokens, lined_up), self.out)
        hidden = self.attention_norm(attended + hidden)
        return self.norm(linear(self.act(linear(hidden, self.up)), self.down) + hidden)

    def _attend(self, qkv: Tensor, batch: EncoderBatch, tokens: Tensor, lined_up: Tensor) -> Tensor:
        rows, width = qkv.shape[0], qkv.shape[1] // 3
        prompts, longest = batch.places.shape
        beside = qkv[batch.places].view(prompts, longest, 3, self.num_heads, -1)
        query, key, value = (part.transpose(1, 2) for part in beside.unbind(2))
        mask = None if batch.mask is None else batch.mask[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        flat = mixed.transpose(1, 2).reshape(prompts * longest, width)
        attended = torch.zeros(rows, width, dtype=qkv.dtype)
        attended[tokens] = flat if batch.mask is None else flat[lined_up]
        return attended


class Encoder:
    """A model ready to run."""

    def __init__(self, config: EncoderConfig, source: WeightSource, *, prefix: str = "") -> None:
        """Take every weight from `source`.

        Args:
            prefix: of the names of the encoder's own tensors.
        """
        self.config = config
        size, home = config.hidden_size, f"{prefix}embeddings"
        self.words = source.take(f"{home}.word_embeddings.weight", (config.vocab_size, size))
        self.positions = source.take(f"{home}.position_embeddings.weight", (config.num_positions, size))
        self.types: Tensor | None = None
        if config.type_vocab_size:
            self.types = source.take(f"{home}.token_type_embeddings.weight", (config.type_vocab_size, size))
        self.norm = Norm(f"{home}.LayerNorm", config, source)
        self.layers = [EncoderLayer(config, layer, prefix, source) for layer in range(config.num_layers)]
        self.rows_like = self.layers[0].qkv
        self.head = ClassifierHead(config, prefix, source) if config.labels else None

    def forward(self, batch: EncoderBatch) -> Tensor:
        """Run the prompts through all layers.

        Returns:
            hidden states [rows, hidden]; rows behind the tokens hold nothing.
        """
        count = batch.token_ids.shape[0]
        missing = best_rows(self.rows_like, count) - count  # so that the layers' products need not pad theirs
        ids, positions, types = (
            functional.pad(part, (0, missing)) for part in (batch.token_ids, batch.positions, batch.types)
        )
        hidden = functional.embedding(ids, self.words) + functional.embedding(positions, self.positions)
        if self.types is not None:
            hidden += functional.embedding(types.clamp(max=self.types.shape[0] - 1), self.types)
        hidden = self.norm(hidden)
        flat = batch.places.flatten()
        lined_up = torch.arange(flat.shape[0]) if batch.mask is None else batch.mask.flatten().nonzero().squeeze(1)
        tokens = flat[lined_up]
        for layer in self.layers:
            hidden = layer(hidden, batch, tokens, lined_up)
        return hidden


class ClassifierHead:
    """Two products around a nonlinearity, on the first token's hidden state."""

    def __init__(self, config: EncoderConfig, prefix: str, source: WeightSource) -> None:
        names = {
            BERT: (f"{prefix}pooler.dense", "classifier"),
            ROBERTA: ("classifier.dense", "classifier.out_proj"),
            DISTILBERT: ("pre_classifier", "classifier"),
        }[config.family]
        size, labels = config.hidden_size, len(config.labels)
        self._act = torch.relu if config.family == DISTILBERT else torch.tanh
        weights = [
            (source.take(f"{name}.weight", (out, size)), source.take(f"{name}.bias", (out,)))
            for name, out in zip(names, (size, labels), strict=True)
        ]
        self._dtype = weights[0][0].dtype
        self._dense, self._out = (pack(weight, bias) for weight, bias in weights)

    def __call__(self, pooled: Tensor) -> Tensor:
        """[rows, hidden] to logits [rows, labels]."""
        return linear(self._act(linear(pooled.to(self._dtype), self._dense)), self._out)
