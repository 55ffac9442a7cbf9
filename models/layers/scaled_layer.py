"""A decoder's layer whose residual is scaled behind it, with a third part for inputs of its own, and with experts
beside its feed-forward part: Gemma 4 (Google, 2026), as in `transformers`.
"""

import msgspec
import torch
from torch import Tensor

from troupellm.kernels.fused_decoder.layers import FusedLayerWeights
from troupellm.kernels.fused_moe import Routing, fused_moe, route
from troupellm.kernels.linear import GATES, linear, pack
from troupellm.kernels.rms_norm import add_rms_norm, rms_norm
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, LayerInputs, MoeConfig
from troupellm.models.layers.attention import Angles, KVPair
from troupellm.models.layers.embedding import Embedding
from troupellm.models.layers.experts import take_experts
from troupellm.models.layers.feed_forward import FeedForward
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.layers.mixers import make_mixer
from troupellm.models.layers.norm import take_norm

TABLE = "model.embed_tokens_per_layer.weight"


class LayerInputTable:
    """The inputs of each layer, from the ids of tokens and their embeddings."""

    def __init__(self, config: DecoderConfig, inputs: LayerInputs, source: WeightSource) -> None:
        self._size, self._eps, layers, hidden = inputs.size, config.rms_norm_eps, config.num_layers, config.hidden_size
        self._table = Embedding(source.embedding(TABLE, (inputs.vocab_size, layers * inputs.size)), None)
        # Rounded like the weights, as in the models' own code.
        self._scale = float(torch.tensor(inputs.size**0.5, dtype=torch.float32).to(self._table.dtype))
        self._projection = pack(source.linear("model.per_layer_model_projection", (layers * inputs.size, hidden)))
        self._shrink = hidden**-0.5
        self._norm = take_norm(config, source, "model.per_layer_projection_norm", inputs.size)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Of token ids int64 [rows] and their vectors [rows, hidden]: [rows, layers, size]."""
        projected = linear(embedded, self._projection).mul_(self._shrink).view(embedded.shape[0], -1, self._size)
        told = self._table(token_ids).mul_(self._scale)
        return rms_norm(projected, self._norm, self._eps).add_(told.view(projected.shape)).mul_(2.0**-0.5)


class _OwnInputs:
    """The third part of a layer: its own inputs behind a gate."""

    def __init__(self, config: DecoderConfig, inputs: LayerInputs, prefix: str, source: WeightSource) -> None:
        hidden, self._eps, self._gate = config.hidden_size, config.rms_norm_eps, GATES[config.activation]
        self._down = pack(source.linear(f"{prefix}.per_layer_input_gate", (inputs.size, hidden)))
        self._up = pack(source.linear(f"{prefix}.per_layer_projection", (hidden, inputs.size)))
        self._norm = take_norm(config, source, f"{prefix}.post_per_layer_input_norm", hidden)

    def __call__(self, residual: Tensor, given: Tensor) -> Tensor:
        """[rows, hidden] and the layer's inputs [rows, size] to [rows, hidden]."""
        gated = self._gate(torch.cat((linear(residual, self._down), given), dim=1))
        return rms_norm(linear(gated, self._up), self._norm, self._eps)


class _ExpertsBeside:
    """Experts that read the residual, with a router of its own norm and a factor for each expert."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig, prefix: str, source: WeightSource) -> None:
        hidden, count, self._eps = config.hidden_size, moe.num_experts, config.rms_norm_eps
        self._router = pack(source.take(f"{prefix}.router.proj.weight", (count, hidden)))
        self._weight = source.take(f"{prefix}.router.scale", (hidden,)).float() * hidden**-0.5
        self._factors = source.take(f"{prefix}.router.per_expert_scale", (count,)).float()
        self._routing = Routing(top_k=moe.top_k, scoring=moe.scoring, renormalize=moe.renormalize)
        self._experts = take_experts(config, moe, f"{prefix}.experts", source)
        names = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        self._behind_dense, self._before, self._behind = (
            take_norm(config, source, f"{prefix}.{name}", hidden) for name in names
        )

    def __call__(self, residual: Tensor, dense: Tensor, tokens: int) -> Tensor:
        """The sum with the result of the part without experts; rows beyond the first `tokens` may hold anything."""
        used = residual[:tokens]
        logits = linear(rms_norm(used, self._weight, self._eps), self._router)
        weights, ids = route(logits, self._routing)
        weights = weights * self._factors[ids.long()]
        hidden = rms_norm(used, self._before, self._eps)
        chosen = fused_moe(hidden, weights, ids, self._experts, batch_invariant=self._router.invariant)
        total = rms_norm(dense, self._behind_dense, self._eps)
        total[:tokens] += rms_norm(chosen, self._behind, self._eps)
        return total


class ScaledLayer:
    """As `DecoderLayer`, of a model with `layer_scalar`. Adds its parts to the residual and leaves no update."""

    def __init__(self, config: DecoderConfig, layer: int, source: WeightSource) -> None:
        prefix, hidden = f"model.layers.{layer}", config.hidden_size
        self.number, self._eps, shape = layer, config.rms_norm_eps, config.layers[layer]
        self.attention = make_mixer(config, layer, source)
        self._feed_forward = FeedForward(config, f"{prefix}.mlp", source, shape.intermediate_size)
        self._before_attention, self._after_attention, self._before_feed_forward, self._after_feed_forward = (
            take_norm(config, source, f"{prefix}.{name}", hidden) for name in msgspec.structs.astuple(config.norms)
        )
        self._experts = None if shape.experts is None else _ExpertsBeside(config, shape.experts, prefix, source)
        self._inputs = None
        if config.layer_inputs is not None:
            self._inputs = _OwnInputs(config, config.layer_inputs, prefix, source)
        self._scalar = source.take(f"{prefix}.layer_scalar", (1,))

    def __call__(
        self,
        update: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        cache: KVPair,
        keep: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """As `DecoderLayer`; it leaves no update."""
        residual = residual if update is None else residual.add_(update)
        attended = self.attention(rms_norm(residual, self._before_attention, self._eps), batch, angles, cache, keep)
        residual = residual if keep is None else residual[keep]
        attended = rms_norm(attended, self._after_attention, self._eps)
        fed = self._fed(add_rms_norm(attended, residual, self._before_feed_forward, self._eps), batch, keep)
        if self._experts is not None:
            fed = self._experts(residual, fed, batch.token_ids.shape[0] if keep is None else keep.shape[0])
        residual.add_(rms_norm(fed, self._after_feed_forward, self._eps))
        if self._inputs is not None:
            assert batch.layer_inputs is not None
            given = batch.layer_inputs[:, self.number]
            residual.add_(self._inputs(residual, given if keep is None else given[keep]))
        return None, residual.mul_(self._scalar)

    def _fed(self, hidden: Tensor, batch: ForwardBatch, keep: Tensor | None) -> Tensor:
        adapters, number = batch.adapters, self.number
        if adapters is None:
            return self._feed_forward(hidden, hidden.shape[0])
        return self._feed_forward.adapted(
            hidden, lambda name, given, result: adapters.add(number, name, given, result, kept=keep is not None)
        )

    def parts(self, rotation: int | None) -> FusedLayerWeights | None:
        """None: compiled code has no layer of this form."""
        return None
