"""The decoder skeleton of all families: embedding, layers, final norm, head."""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.linear import PackedLinear, best_rows, linear, pack
from troupellm.kernels.rms_norm import add_rms_norm
from troupellm.models.checkpoint import WeightSource
from troupellm.models.forward_batch import ForwardBatch
from troupellm.models.hf_config import DecoderConfig
from troupellm.models.layers import DecoderLayer, KVPair
from troupellm.models.rope import rope_tables

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
SCORE = "score.weight"


class Decoder:
    """A model ready to run."""

    def __init__(self, config: DecoderConfig, source: WeightSource, *, max_model_len: int) -> None:
        """Take every weight from `source`.

        Args:
            max_model_len: longest sequence, which the rotary tables are made for.
        """
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = source.take(EMBEDDING, shape)
        self.layers = [DecoderLayer(config, layer, source) for layer in range(config.num_layers)]
        self.norm = source.take(FINAL_NORM, (config.hidden_size,))
        self.head: PackedLinear | None = None
        self.score: PackedLinear | None = None
        """Of a classifier."""
        if config.head == "lm":
            self.head = pack(self.embedding if config.tie_word_embeddings else source.take(HEAD, shape))
        elif config.head == "score":
            self.score = pack(source.take(SCORE, (config.num_labels, config.hidden_size)))
        self.cos, self.sin = rope_tables(config.rope, config.head_dim, max_model_len, self.embedding.dtype)

    def forward(self, batch: ForwardBatch, caches: list[KVPair]) -> Tensor:
        """Run the flat batch through all layers.

        Args:
            caches: one pair per layer; the batch's keys and values are written to them.

        Returns:
            hidden states [logits, hidden] of the tokens that logits are wanted for, after the final norm.
        """
        token_ids, positions = batch.token_ids, batch.positions
        missing = best_rows(self.layers[0].attention.qkv, token_ids.shape[0]) - token_ids.shape[0]
        if missing > 0:  # rows that nothing is kept of, so that the layers' products need not pad theirs
            token_ids, positions = (functional.pad(ids, (0, missing)) for ids in (token_ids, positions))
        angles = self.cos[positions], self.sin[positions]
        update = functional.embedding(token_ids, self.embedding)
        if batch.inputs is not None:
            places, values = batch.inputs
            update[places] = values.to(update.dtype)
        residual = torch.zeros_like(update)
        for layer, cache in zip(self.layers[:-1], caches, strict=False):
            update, residual = layer(update, residual, batch, angles, cache)
        # After the last keys and values are written, only the tokens that logits are wanted for matter.
        update, residual = self.layers[-1](update, residual, batch, angles, caches[-1], batch.logit_tokens)
        return add_rms_norm(update, residual, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the vocabulary, float32 [rows, vocab]."""
        if self.head is None:
            raise RuntimeError("this model does not generate text")
        return linear(hidden, self.head).float()

    def classify(self, hidden: Tensor) -> Tensor:
        """A classifier's logits, [rows, labels]."""
        if self.score is None:
            raise RuntimeError("this model has no classifier")
        return linear(hidden.to(self.embedding.dtype), self.score)


class BareNames:
    """Weights of a decoder that was saved without anything on top, whose names lack the first part."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(name.removeprefix("model."), shape)
