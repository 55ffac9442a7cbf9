"""A feed-forward part with a router that chooses experts."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.fused_moe import PackedExperts, Routing, Swiglu, fused_moe, pack_experts, route
from troupellm.kernels.fused_moe.experts import AddToExpert, experts_with_additions
from troupellm.kernels.fused_moe.sigmoid import batch_invariant_sigmoid
from troupellm.kernels.linear import linear, pack
from troupellm.kernels.quantized_linear import merge
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig, MoeConfig
from troupellm.models.layers.projections import Divided, rows_of
from troupellm.protocol.errors import ModelLoadError

Shared = Callable[[Tensor, int], Tensor]
_APART = ("gate_proj", "up_proj")


def block_prefix(moe: MoeConfig, layer: str, source: WeightSource) -> str:
    """Prefix of the names of a layer's experts and router: the first one of the family's that the source has."""
    prefixes = [f"{layer}.{block}" for block in moe.names.blocks]
    return next((prefix for prefix in prefixes if source.has(f"{prefix}.{moe.names.router}.weight")), prefixes[0])


class Experts:
    """A router, the experts that it chooses from, and optionally an expert that all tokens share."""

    def __init__(
        self, config: DecoderConfig, moe: MoeConfig, prefix: str, source: WeightSource, shared: Shared | None
    ) -> None:
        """Take router and experts from `source`. The router stays as it came: it is small, and it decides.

        Args:
            shared: [rows, hidden] and how many of them count to [rows, hidden].
        """
        router, count, hidden = f"{prefix}.{moe.names.router}", moe.num_experts, config.hidden_size
        bias = source.take(f"{router}.bias", (count,)) if moe.bias else None
        weight = source.take(f"{router}.weight", (count, hidden))
        self._wide = moe.wide_router or weight.dtype == torch.float32
        self.router = pack(weight.float() if self._wide else weight, bias)
        self.choice_bias: Tensor | None = None
        if moe.choice_bias:
            shape = (1, count) if moe.names.bias_in_row else (count,)
            self.choice_bias = source.take(f"{prefix}.{moe.names.choice_bias}", shape).float().flatten()
        self.routing = Routing(
            top_k=moe.top_k,
            scoring=moe.scoring,
            renormalize=moe.renormalize,
            scale=moe.scale,
            groups=moe.groups,
            top_groups=moe.top_groups,
            group_score=moe.group_score,
        )
        self.experts = take_experts(config, moe, f"{prefix}.experts", source)
        self._ranks = source.sum_of(f"{prefix}.experts") if isinstance(source, Divided) else None
        self._weighs_inputs = moe.weighs_inputs
        self.shared = shared
        self.shared_gate = (
            pack(source.take(f"{prefix}.shared_expert_gate.weight", (1, hidden))) if (moe.shared_gate) else None
        )

    def __call__(self, hidden: Tensor, tokens: int, add: AddToExpert | None = None) -> Tensor:
        """As `FeedForwardPart`. Rows behind the tokens are given to no expert, whose weights they would cost.

        Args:
            add: adds adapters to the products of experts, on a CPU; None where inputs are weighed.
        """
        used = hidden[:tokens]
        logits = linear(used.float() if self._wide else used, self.router)
        weights, ids = route(logits, self.routing, self.choice_bias)
        if self._weighs_inputs:
            total = self._of_weighed(used, weights.to(used.dtype), ids)
        elif add is None:
            total = fused_moe(used, weights, ids, self.experts, batch_invariant=self.router.invariant)
        else:
            experts = self.experts
            total = experts_with_additions(used, weights, ids, experts.gate_up, experts.down, experts.swiglu, add)
        if self.shared is not None:
            shared = self.shared(used, tokens)
            if self.shared_gate is not None:
                shared = shared.mul_(batch_invariant_sigmoid(linear(used, self.shared_gate)))
            total = total.add_(shared)
        if self._ranks is not None:
            self._ranks.sum_(total)
        missing = hidden.shape[0] - tokens
        return functional.pad(total, (0, 0, 0, missing)) if missing else total

    def _of_weighed(self, used: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The sum over a token's experts of what they make of the token times their weight [tokens, top_k]."""
        (tokens, top_k), hidden = ids.shape, used.shape[1]
        inputs = (used[:, None] * weights[:, :, None]).view(tokens * top_k, hidden)
        ones = torch.ones(tokens * top_k, 1, dtype=torch.float32, device=used.device)
        each = fused_moe(inputs, ones, ids.view(-1, 1), self.experts, batch_invariant=self.router.invariant)
        parts = each.view(tokens, top_k, hidden)
        return parts[:, 0] if top_k == 1 else parts.sum(1)


def take_experts(config: DecoderConfig, moe: MoeConfig, prefix: str, source: WeightSource) -> PackedExperts:
    """All experts of one layer, from a tensor per expert and projection or from one for all experts."""
    hidden, size, count, names = config.hidden_size, moe.intermediate_size, moe.num_experts, moe.names
    gate_ups = source.stacked(f"{prefix}.gate_up_proj", (count, 2 * size, hidden), transposed=names.transposed)
    merged = gate_ups is not None
    if gate_ups is not None:
        downs = source.stacked(f"{prefix}.down_proj", (count, hidden, size), transposed=names.transposed)
        if downs is None:
            raise ModelLoadError(f"tensor {prefix}.down_proj is missing")
    elif names.transposed and not source.has(f"{prefix}.0.{names.gate}.weight"):
        raise ModelLoadError(f"tensor {prefix}.gate_up_proj is missing")
    else:
        experts = [f"{prefix}.{expert}" for expert in range(count)]
        shape = (size, hidden)
        gate_ups = [
            merge([source.linear(f"{expert}.{names.gate}", shape), source.linear(f"{expert}.{names.up}", shape)])
            for expert in experts
        ]
        downs = [source.linear(f"{expert}.{names.down}", (hidden, size)) for expert in experts]
    gate_up_bias = _gate_up_bias(moe, prefix, source, merged=merged) if moe.bias else None
    down_bias = source.take(f"{prefix}.down_proj_bias", (count, hidden)) if moe.bias else None
    if names.interleaved and merged:
        order = torch.cat((torch.arange(0, 2 * size, 2), torch.arange(1, 2 * size, 2)))
        gate_ups = [rows_of(weight, order) for weight in gate_ups]
        gate_up_bias = None if gate_up_bias is None else gate_up_bias[:, order]
    swiglu = Swiglu(alpha=moe.swiglu_alpha, limit=moe.swiglu_limit, activation=moe.activation)
    return pack_experts(gate_ups, downs, swiglu, gate_up_bias, down_bias)


def _gate_up_bias(moe: MoeConfig, prefix: str, source: WeightSource, *, merged: bool) -> Tensor:
    """[experts, 2 * size]; merged: whether the checkpoint has it in one tensor."""
    count, size = moe.num_experts, moe.intermediate_size
    if merged:
        return source.take(f"{prefix}.gate_up_proj_bias", (count, 2 * size))
    return torch.cat([source.take(f"{prefix}.{name}_bias", (count, size)) for name in _APART], dim=1)
