"""Adapters of experts: of tensors that hold all experts of a layer, as transformers 5 has them, or of each expert."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.kernels.fused_moe.experts import AddToExpert
from troupellm.models.adapters.files import FILE, FIRST_MATRIX, SECOND_MATRIX, Stored
from troupellm.models.adapters.settings import MERGE, AdapterSettings
from troupellm.models.adapters.sites import plain_module
from troupellm.models.config.decoder_config import DecoderConfig, MoeConfig
from troupellm.models.hub.errors import plain_name
from troupellm.protocol.errors import AdapterError

_STACKED = re.compile(r"layers\.(?P<layer>\d{1,6})\.(?P<block>[\w.]+)\.experts(?P<inner>\.base_layer)?", re.ASCII)
_SINGLE = re.compile(
    r"layers\.(?P<layer>\d{1,6})\.(?P<block>[\w.]+)\.experts\.(?P<expert>\d{1,6})\.(?P<name>\w+)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Factors:
    """The adapter of one product of all experts."""

    down: Tensor
    """[experts, rank, in_features]."""
    up: Tensor
    """[experts, out_features, rank], times the scale."""


@dataclass(frozen=True, slots=True)
class ExpertAdapter:
    """The adapter of the experts of one layer."""

    gate_up: Factors | None = None
    """Outputs of the gate first."""
    down: Factors | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [
            tensor
            for factors in (self.gate_up, self.down)
            if factors is not None
            for tensor in (factors.down, factors.up)
        ]


def additions(groups: Sequence[tuple[int, ExpertAdapter]], of_tokens: Tensor) -> AddToExpert:
    """Add the adapters of some tokens to the products of experts.

    Args:
        groups: numbers, and the adapter of the tokens that have it.
        of_tokens: int64 [tokens], the number of each token.
    """

    def add(product: str, expert: int, tokens: Tensor, x: Tensor, out: Tensor) -> None:
        of_rows = of_tokens[tokens]
        for number, adapter in groups:
            factors = adapter.gate_up if product == "gate_up" else adapter.down
            if factors is not None and (places := (of_rows == number).nonzero().flatten()).numel():
                out.index_add_(0, places, x[places] @ factors.down[expert].t() @ factors.up[expert].t())

    return add


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One pair of matrices, checked."""

    layer: int
    expert: int | None
    """None: of all experts."""
    name: str
    """gate_up, gate, up or down."""
    module: str
    """As patterns of ranks and scales know it."""
    rank: int
    first: Stored
    second: Stored


def is_of_experts(entry: Stored) -> bool:
    """True for a tensor of experts, in any form."""
    return ".experts." in f"{entry.module}."


def check_experts(
    stored: list[Stored], model: DecoderConfig, settings: AdapterSettings, max_rank: int
) -> list[ExpertPart]:
    """The pairs of matrices, after all names and shapes were checked.

    Raises:
        AdapterError: a tensor has no place, or not the shape that it must have.
    """
    pairs: dict[str, dict[str, Stored]] = {}
    for entry in stored:
        if entry.kind not in (FIRST_MATRIX, SECOND_MATRIX):
            text = f"{FILE}: tensor {plain_name(entry.name)} is none of an expert's adapter"
            raise AdapterError(text, hint=MERGE)
        pairs.setdefault(entry.module, {})[entry.kind] = entry
    found: dict[tuple[int, int | None, str], ExpertPart] = {}
    forms: dict[int, bool] = {}
    """Of each layer, whether it has tensors of single experts."""
    for pair in pairs.values():
        for kind in {FIRST_MATRIX, SECOND_MATRIX} - pair.keys():
            name = plain_name(next(iter(pair.values())).name)
            raise AdapterError(f"{FILE}: {name} has no {kind.removeprefix('.')} beside it")
        part = _part(pair[FIRST_MATRIX], pair[SECOND_MATRIX], model, settings, max_rank)
        key = (part.layer, part.expert, part.name)
        single = forms.setdefault(part.layer, part.expert is not None)
        if key in found or single != (part.expert is not None):
            raise AdapterError(f"{FILE}: tensor {plain_name(part.first.name)} is for the same experts as another one")
        found[key] = part
    return list(found.values())


def _part(first: Stored, second: Stored, model: DecoderConfig, settings: AdapterSettings, max_rank: int) -> ExpertPart:
    module = plain_module(first.module)
    match = _STACKED.fullmatch(module) or _SINGLE.fullmatch(module)
    layer = -1 if match is None else int(match["layer"])
    moe = model.layers[layer].experts if 0 <= layer < model.num_layers else None
    if moe is None or match is None or match["block"] not in (*moe.names.blocks, "mlp"):
        raise AdapterError(
            f"{FILE}: tensor {plain_name(first.name)} is for experts that this model does not have",
            hint="serve it with the base model that it was trained on",
        )
    if moe.weighs_inputs:
        text = f"{FILE}: tensor {plain_name(first.name)} adapts experts whose inputs are weighed, which is not served"
        raise AdapterError(text, hint=MERGE)
    if match.re is _STACKED:
        return _stacked(layer, first, second, model, moe, settings, max_rank)
    names = {moe.names.gate: "gate", moe.names.up: "up", moe.names.down: "down"}
    expert, name = int(match["expert"]), names.get(match["name"])
    if name is None or expert >= moe.num_experts:
        raise AdapterError(
            f"{FILE}: tensor {plain_name(first.name)} is for an expert that this model does not have",
            hint="serve it with the base model that it was trained on",
        )
    rank, hidden, size = settings.checked_rank(first.module, max_rank), model.hidden_size, moe.intermediate_size
    inputs, outputs = (size, hidden) if name == "down" else (hidden, size)
    _check_shapes(first, second, (rank, inputs), (outputs, rank))
    return ExpertPart(layer, expert, name, first.module, rank, first, second)


def _stacked(
    layer: int,
    first: Stored,
    second: Stored,
    model: DecoderConfig,
    moe: MoeConfig,
    settings: AdapterSettings,
    max_rank: int,
) -> ExpertPart:
    """The order in which PEFT wraps the two tensors of a layer decides about its names; shapes tell them apart."""
    hidden, size, count = model.hidden_size, moe.intermediate_size, moe.num_experts
    name, inputs, outputs = "down", size, hidden
    if (first.shape[-1:], second.shape[:1]) == ((hidden,), (2 * size,)):
        name, inputs, outputs = "gate_up", hidden, 2 * size
    module = f"{first.module.removesuffix('.base_layer')}.{name}_proj"
    rank = settings.checked_rank(module, max_rank)
    _check_shapes(first, second, (count * rank, inputs), (outputs, count * rank))
    return ExpertPart(layer, None, name, module, rank, first, second)


def _check_shapes(first: Stored, second: Stored, *wanted: tuple[int, int]) -> None:
    for entry, shape in zip((first, second), wanted, strict=True):
        if entry.shape != shape:
            text = f"has shape {list(entry.shape)}, expected {list(shape)} for the experts of this model"
            raise AdapterError(f"{FILE}: tensor {plain_name(entry.name)} {text}")


Matrices = tuple[ExpertPart, Tensor, Tensor]
"""A part, its first matrix as it is stored, and its second one times the scale."""


def layer_adapter(parts: Sequence[Matrices], model: DecoderConfig) -> ExpertAdapter:
    """The adapter of one layer, from all of its parts."""
    moe = model.layers[parts[0][0].layer].experts
    assert moe is not None
    stacked = {part.name: _all_experts(moe, part, down, up) for part, down, up in parts if part.expert is None}
    if stacked:
        return ExpertAdapter(**stacked)
    wide = [each for each in parts if each[0].name != "down"]
    narrow = [each for each in parts if each[0].name == "down"]
    return ExpertAdapter(
        _single_experts(moe, wide, model.hidden_size, 2 * moe.intermediate_size) if wide else None,
        _single_experts(moe, narrow, moe.intermediate_size, model.hidden_size) if narrow else None,
    )


def _all_experts(moe: MoeConfig, part: ExpertPart, down: Tensor, up: Tensor) -> Factors:
    """As PEFT's ParamWrapper has them: [experts, rank, in] and [out, rank, experts]."""
    downs = down.view(moe.num_experts, part.rank, down.shape[1])
    ups = up.view(up.shape[0], part.rank, moe.num_experts).permute(2, 0, 1)
    if part.name == "gate_up" and moe.names.interleaved:
        ups = torch.cat((ups[:, 0::2], ups[:, 1::2]), dim=1)
    return Factors(downs.contiguous(), ups.contiguous())


def _single_experts(moe: MoeConfig, parts: Sequence[Matrices], inputs: int, outputs: int) -> Factors:
    """Gate and up each have ranks of their own, which add nothing to the other's outputs."""
    room, like = max(part.rank for part, _, _ in parts), parts[0][2]
    halves = 1 if parts[0][0].name == "down" else 2
    downs = like.new_zeros(moe.num_experts, halves * room, inputs)
    ups = like.new_zeros(moe.num_experts, outputs, halves * room)
    for part, down, up in parts:
        assert part.expert is not None
        half, rows = int(part.name == "up"), up.shape[0]
        ranks = slice(half * room, half * room + part.rank)
        downs[part.expert, ranks] = down
        ups[part.expert, half * rows : (half + 1) * rows, ranks] = up
    return Factors(downs, ups)
