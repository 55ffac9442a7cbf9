"""Attention that reads all it needs from tensors, as the kernels on a GPU do, in plain torch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from troupellm.kernels.kv_quant import decode
from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.paged_attention.backends import Planned
from troupellm.models.gpu.batch import DeviceSpans
from troupellm.models.layers.cache_layout import View


@dataclass(frozen=True, slots=True)
class Seen:
    """The inputs of `DevicePlan`, read when the layers run."""

    tables: Tensor
    spans: DeviceSpans
    window: int | None


class TensorAttention:
    """A back end without a plan of its own."""

    def attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        plan: Seen,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        spans = plan.spans
        token = torch.arange(query.shape[0], device=query.device)
        inside = (token[:, None] >= spans.starts) & (token[:, None] < spans.stops)
        row = inside.int().argmax(1)
        position = spans.context_lens[row] - (spans.stops[row] - token)
        blocks = plan.tables[row].clamp(min=0).long()
        keys, values = (
            decode(cache, torch.float32)[blocks]
            .transpose(1, 2)
            .flatten(2, 3)
            .repeat_interleave(query.shape[1] // cache.shape[1], dim=1)
            for cache in caches
        )
        place = torch.arange(keys.shape[2], device=query.device)
        seen = (place <= position[:, None]) & inside.any(1)[:, None]
        if spans.trees is not None:
            tree = spans.trees[plan.window]
            position, behind = tree.positions, place - tree.bases[row][:, None]
            bits = (tree.nodes[:, None] >> behind.clamp(0, 63)) & 1
            seen &= (behind < 0) | (bits == 1)
        if plan.window is not None:
            seen &= place > position[:, None] - plan.window
        scores = torch.einsum("thd,thkd->thk", query.float(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().expand(query.shape[0], -1)[:, :, None]), dim=2)
        weights = scores.softmax(-1)[:, :, : place.numel()].nan_to_num(0.0)
        values = torch.where(seen[:, None, :, None], values, 0.0)
        return torch.einsum("thk,thkd->thd", weights, values).to(query.dtype).contiguous()


def plan_tensors(tables: Tensor, spans: DeviceSpans, view: View) -> Plan:
    """A `models.gpu.batch.GroupPlanner`."""
    backend: Any = TensorAttention()
    rows: Any = Seen(tables, spans, view.window)
    return Planned(backend, rows)
