"""The decoder skeleton of all families: embedding, layers, final norm, head."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.common.batch_invariance import batch_invariance
from troupellm.kernels.fused_decoder.layers import DecoderLayers, FusedLayerWeights, decoder_layers, own_products
from troupellm.kernels.linear import PackedLinear, linear, norm_scores, pack
from troupellm.kernels.paged_attention.cpu import takes_compiled
from troupellm.kernels.quantized_linear import QuantizedWeight, Weight
from troupellm.kernels.rms_norm import rms_norm
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, QueryGrowth
from troupellm.models.layers.attention import Angles, KVPair
from troupellm.models.layers.aux_hidden_states import NO_AUX_HIDDEN_STATES, AuxHiddenStates
from troupellm.models.layers.block import DecoderLayer
from troupellm.models.layers.embedding import Embedding
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.layer_norm_block import LayerNorm, LayerNormLayer
from troupellm.models.layers.norm import take_norm
from troupellm.models.layers.projections import rows_of
from troupellm.models.layers.rope import rope_tables, rotation_of
from troupellm.models.layers.scaled_layer import LayerInputTable, ScaledLayer
from troupellm.models.layers.single_part_layer import SinglePartLayer

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head", "model.norm"
SCORE = "score"


class RunnableDecoder(Protocol):
    """The part of a decoder that the runner needs; `transformers` models implement it, too."""

    config: DecoderConfig
    batch_invariant: bool
    """True if a row's results are the same bits for any other rows in its batch."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of queries, keys and values."""

    @property
    def head(self) -> object | None:
        """None if the model does not generate text."""

    @property
    def score(self) -> object | None:
        """None if it has no classifier."""

    def forward(self, batch: ForwardBatch, caches: list[KVPair]) -> Tensor:
        """As `Decoder.forward`."""

    def forward_with_aux(
        self, batch: ForwardBatch, caches: list[KVPair], aux_hidden_states: AuxHiddenStates
    ) -> tuple[Tensor, Tensor]:
        """As `Decoder.forward_with_aux`."""

    def normed(self, hidden: Tensor) -> Tensor:
        """As `Decoder.normed`."""

    @property
    def angle_table(self) -> Tensor | None:
        """As `Decoder.angle_table`."""

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, add_adapters: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """As `Decoder.logits`."""

    def classify(self, hidden: Tensor) -> Tensor:
        """As `Decoder.classify`."""


class Decoder:
    """A model ready to run."""

    def __init__(self, config: DecoderConfig, source: WeightSource, *, max_model_len: int) -> None:
        """Take every weight from `source`.

        Args:
            max_model_len: longest sequence, which the rotary tables are made for.
        """
        self.config = config
        self.batch_invariant = batch_invariance()
        """True if a row's numbers must not depend, down to the bit, on the other rows of its batch."""
        shape = (config.vocab_size, config.hidden_size)
        vectors = source.embedding(EMBEDDING, shape)
        # Rounded like the weights, as in the models' own code.
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=torch.float32).to(vectors.dtype))
        block = config.layer_norms
        self.layers = [_layer(config, layer, source) for layer in range(config.num_layers)]
        self.num_writing = config.num_writing
        self.layer_inputs = None
        if config.layer_inputs is not None:
            self.layer_inputs = LayerInputTable(config, config.layer_inputs, source)
        self.layer_norm = None if block is None else LayerNorm(config, block, source, FINAL_NORM)
        """The last norm of a model with layer norms."""
        self.norm = (
            take_norm(config, source, FINAL_NORM, config.hidden_size)
            if self.layer_norm is None
            else self.layer_norm.weight
        )
        """The weight of the last norm, [hidden]."""
        self.head: PackedLinear | None = None
        shared: PackedLinear | None = None
        self.score: PackedLinear | None = None
        """The output layer of a classifier."""
        if config.head == "lm":
            head = source.tied(vectors) if config.tie_word_embeddings else source.linear(HEAD, shape)
            bias = source.take(f"{HEAD}.bias", (config.vocab_size,)) if config.head_bias else None
            self.head = pack(_normed(head, vectors.dtype) if config.head_normed else head, bias)
            shared = self.head if head is vectors and not config.head_normed and bias is None else None
        elif config.score_tokens is not None:
            head = source.tied(vectors) if config.tie_word_embeddings else source.linear(HEAD, shape)
            self.score = pack(_difference(head, config.score_tokens, vectors.dtype))
        elif config.head == "score":
            self.score = pack(source.linear(SCORE, (config.num_labels, config.hidden_size)))
        self.embedding = Embedding(vectors, shared)
        turns = [rotation_of(shape) for shape in config.layers]
        kinds = list(dict.fromkeys(rotation for rotation in turns if rotation is not None))
        tables = [rope_tables(rope, size, max_model_len, self.embedding.dtype) for rope, size in kinds]
        self.tables = [(cos.to(self.embedding.device), sin.to(self.embedding.device)) for cos, sin in tables]
        """Cosines and sines by position, of every kind of rotation that a layer has."""
        self.layer_tables = [None if rotation is None else kinds.index(rotation) for rotation in turns]
        parts = self._parts()
        self.together = None if parts is None else decoder_layers(parts)
        """All layers in one call, for few tokens; None where there is no such thing."""
        self.thread_invariant = self.batch_invariant and parts is not None and own_products(parts, self.head)
        """True if logits are the same to the bit for any number of threads: compiled code computes every sum."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""
        return self.embedding.dtype

    def forward(self, batch: ForwardBatch, caches: list[KVPair]) -> Tensor:
        """Run the flat batch through all layers.

        Args:
            caches: one pair per layer; the batch's keys and values are written to them.

        Returns:
            hidden states [logits, hidden] of the tokens that logits are wanted for, before the final norm.
        """
        return self._run(batch, caches, NO_AUX_HIDDEN_STATES, None)

    def forward_with_aux(
        self, batch: ForwardBatch, caches: list[KVPair], aux_hidden_states: AuxHiddenStates
    ) -> tuple[Tensor, Tensor]:
        """Run `forward` and also return intermediate hidden states, of all tokens and not only of those with logits.

        Returns:
            as `forward`, and the hidden states that `aux_hidden_states` names [tokens, width], concatenated in its
            order.
        """
        width = self.config.hidden_size * (len(aux_hidden_states.layers) + aux_hidden_states.last)
        aux = self.embedding.new_empty(batch.token_ids.shape[0], width)
        return self._run(batch, caches, aux_hidden_states, aux), aux

    def _run(
        self, batch: ForwardBatch, caches: list[KVPair], aux_hidden_states: AuxHiddenStates, aux: Tensor | None
    ) -> Tensor:
        """aux: [tokens, width], to be written to; None where `aux_hidden_states` are none."""
        adapters = batch.adapters
        if self.together is not None and not aux_hidden_states.layers and (adapters is None or adapters.compiled):
            plans = [group.plan for group in batch.groups]
            if self.together.takes(batch.token_ids.shape[0], plans, caches):
                return self._run_together(self.together, batch, caches, aux if aux_hidden_states.last else None)
        token_ids, positions, tokens = batch.token_ids, batch.positions, batch.token_ids.shape[0]
        if self.config.query_growth is not None:
            batch = replace(batch, query_factors=_growth(self.config.query_growth, positions).to(self.dtype))
        missing = self.layers[0].attention.best_rows(tokens) - tokens
        if missing > 0:  # rows that nothing is kept of, so that the layers' products need not pad theirs
            token_ids, positions = (functional.pad(ids, (0, missing)) for ids in (token_ids, positions))
        angles = self._angles(positions) if batch.angles is None or missing > 0 else self._parted(batch.angles)
        residual = self._entering(token_ids, batch)
        if self.layer_inputs is not None:
            batch = replace(batch, layer_inputs=self.layer_inputs(token_ids, residual))
        update = None
        last = len(self.layers) - 1
        # After the last keys and values are written, only the tokens that logits are wanted for matter.
        every = aux_hidden_states.last or any(layer >= self.num_writing - 1 for layer in aux_hidden_states.layers)
        keep = None if every else batch.logit_tokens
        narrows = batch.reading is not None or (keep is not None and keep.shape[0] == 0)
        narrowing = self.num_writing - 1 if narrows else last
        for number, layer in enumerate(self.layers):
            kept = keep if number == narrowing else None
            update, residual = layer(update, residual, batch, angles[number], caches[number], kept)
            if number == last:
                break
            if kept is not None:
                if kept.shape[0] == 0:
                    return residual
                batch, angles = _narrowed(batch, angles, kept)
            for place in _places(aux_hidden_states, number):
                _take_aux(aux, place, update, residual)
        hidden = residual if update is None else residual.add_(update)
        if keep is not None:
            return hidden
        hidden = hidden[:tokens]
        for place in [
            *_places(aux_hidden_states, last),
            *([len(aux_hidden_states.layers)] if aux_hidden_states.last else ()),
        ]:
            _take_aux(aux, place, None, hidden)
        return batch.with_logits(hidden)

    def _entering(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """The input of the first layer: token embeddings, replaced where the batch brings its own."""
        residual = self.embed(token_ids)
        if batch.adapters is not None:
            batch.adapters.embed(token_ids, residual, self.embedding_scale)
        if batch.inputs is not None:
            places, values = batch.inputs
            scale = self.embedding_scale if self.config.scale_inputs else 1.0
            residual[places] = values.to(residual.dtype) * scale
        return residual

    def _run_together(
        self, layers: DecoderLayers, batch: ForwardBatch, caches: list[KVPair], aux: Tensor | None
    ) -> Tensor:
        """As `_run`, in one call. aux: for the output of the last layer."""
        residual = self._entering(batch.token_ids, batch)
        views = [(group.plan, group.kv_rows) for group in batch.groups if takes_compiled(group.plan)]
        adapters = None if batch.adapters is None else batch.adapters.of_layers()
        if aux is None:
            return layers.run(residual, batch.positions, views, self.tables, caches, batch.logit_tokens, adapters)
        layers.run(residual, batch.positions, views, self.tables, caches, None, adapters)
        aux.copy_(residual)
        return batch.with_logits(residual)

    def _parts(self) -> list[FusedLayerWeights] | None:
        """The parts from which compiled code computes all layers; None if some layer has another form."""
        if self.embedding.dtype != torch.float32 or self.embedding.device.type != "cpu":
            return None
        if self.config.query_growth is not None:
            return None
        parts = [layer.parts(turns) for layer, turns in zip(self.layers, self.layer_tables, strict=True)]
        known = [part for part in parts if part is not None]
        return known if len(known) == len(parts) else None

    def embed(self, token_ids: Tensor) -> Tensor:
        """The input of the first layer [tokens, hidden], for token ids int64 [tokens]."""
        embedded = self.embedding(token_ids)
        return embedded if self.embedding_scale == 1.0 else embedded.mul_(self.embedding_scale)

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm."""
        if self.layer_norm is not None:
            return self.layer_norm(hidden)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def _angles(self, positions: Tensor) -> list[Angles | None]:
        """Cosines and sines of each layer's rotation, at the batch's positions."""
        found = [(cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in self.tables]
        return [None if table is None else found[table] for table in self.layer_tables]

    @cached_property
    def angle_table(self) -> Tensor | None:
        """All of `tables` beside each other [positions, width], for one look at a position's; None without any."""
        parts = [part for pair in self.tables for part in pair]
        return torch.cat(parts, dim=-1).squeeze(1) if parts else None

    def _parted(self, looked_up: Tensor) -> list[Angles | None]:
        """Split rows of `angle_table` into the angles of each layer's rotation."""
        halves = [cos.shape[-1] for cos, _ in self.tables for _ in range(2)]
        parts = torch.split(looked_up[:, None], halves, dim=-1)
        return [None if table is None else (parts[2 * table], parts[2 * table + 1]) for table in self.layer_tables]

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, add_adapters: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """Scores of the vocabulary, float32 [rows, vocab], of hidden states before the final norm.

        Args:
            out: where to leave them.
            add_adapters: adds to scores, in place, the adapters' part for hidden states behind the final norm.
        """
        if self.head is None:
            raise RuntimeError("this model does not generate text")
        if self.layer_norm is not None:
            plain = linear(self.layer_norm(hidden), self.head).float()
            scores = plain if out is None else out.copy_(plain)
        else:
            scores = norm_scores(hidden, self.norm, self.config.rms_norm_eps, self.head, out)
        if add_adapters is not None:
            add_adapters(self.normed(hidden), scores)
        return self._scaled(scores)

    def scores(self, normed: Tensor) -> Tensor:
        """Logits of hidden states that have gone through the final norm, or need none."""
        if self.head is None:
            raise RuntimeError("this model does not generate text")
        return self._scaled(linear(normed, self.head).float())

    def _scaled(self, logits: Tensor) -> Tensor:
        """Scale and cap logits, in place."""
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        cap = self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def classify(self, hidden: Tensor) -> Tensor:
        """A classifier's logits [rows, labels], of hidden states behind the final norm."""
        if self.score is None:
            raise RuntimeError("this model has no classifier")
        return linear(hidden.to(self.embedding.dtype), self.score)


def _layer(
    config: DecoderConfig, layer: int, source: WeightSource
) -> DecoderLayer | LayerNormLayer | ScaledLayer | SinglePartLayer:
    if config.single_parts:
        return SinglePartLayer(config, layer, source)
    if config.layer_scalar:
        return ScaledLayer(config, layer, source)
    block = config.layer_norms
    return DecoderLayer(config, layer, source) if block is None else LayerNormLayer(config, block, layer, source)


def _normed(head: Weight, dtype: torch.dtype) -> Tensor:
    """The head [vocab, hidden] with rows of length 1."""
    plain = head.dequantize(dtype) if isinstance(head, QuantizedWeight) else head
    return functional.normalize(plain.float(), dim=-1).to(dtype)


def _difference(head: Weight, tokens: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The rows of two tokens in the head [vocab, hidden], the second's taken from the first's: [1, hidden]."""
    rows = rows_of(head, torch.tensor(tokens, device=_device(head)))
    plain = rows.dequantize(torch.float32) if isinstance(rows, QuantizedWeight) else rows.float()
    return (plain[:1] - plain[1:]).to(dtype)


def _device(weight: Weight) -> torch.device:
    return weight.tensors()[0].device if isinstance(weight, QuantizedWeight) else weight.device


def _growth(growth: QueryGrowth, positions: Tensor) -> Tensor:
    """Factors of the queries at some positions, float32 [tokens, 1]."""
    return ((positions + growth.ahead) // growth.original + 1).float().log_().mul_(growth.beta).add_(1.0)[:, None]


def _narrowed(
    batch: ForwardBatch, angles: list[Angles | None], keep: Tensor
) -> tuple[ForwardBatch, list[Angles | None]]:
    """A batch and the angles of each layer for layers that only read, of the tokens `keep`."""
    assert batch.reading is not None
    adapters, inputs, factors = batch.adapters, batch.layer_inputs, batch.query_factors
    narrowed = replace(
        batch,
        token_ids=batch.token_ids[keep],
        groups=batch.reading,
        layer_inputs=None if inputs is None else inputs[keep],
        query_factors=None if factors is None else factors[keep],
        adapters=None if adapters is None else replace(adapters, tokens=adapters.kept),
    )
    turned = {id(pair): None if pair is None else (pair[0][keep], pair[1][keep]) for pair in angles}
    return narrowed, [turned[id(pair)] for pair in angles]


def _places(aux_hidden_states: AuxHiddenStates, layer: int) -> list[int]:
    """Where a layer's output goes among the hidden states that are shown, once or several times."""
    return (
        [place for place, wanted in enumerate(aux_hidden_states.layers) if wanted == layer]
        if aux_hidden_states.layers
        else []
    )


def _take_aux(aux: Tensor | None, place: int, update: Tensor | None, residual: Tensor) -> None:
    """Keep a layer's output of all tokens; those are the first rows, before the padding."""
    assert aux is not None
    width = residual.shape[1]
    found = aux[:, place * width : (place + 1) * width]
    rows = residual[: found.shape[0]]
    if update is None:
        found.copy_(rows)
    else:
        torch.add(rows, update[: found.shape[0]], out=found)
