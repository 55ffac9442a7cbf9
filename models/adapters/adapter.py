"""Reads an adapter strictly: every tensor has its place in the decoder, and no place has half an adapter."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from troupellm.models.adapters.base_weights import BaseWeights
from troupellm.models.adapters.entries import Entries, Place, check_all
from troupellm.models.adapters.experts import (
    ExpertAdapter,
    ExpertPart,
    Matrices,
    check_experts,
    is_of_experts,
    layer_adapter,
)
from troupellm.models.adapters.files import (
    BIAS,
    COPY,
    FILE,
    FIRST_MATRIX,
    FIRST_VECTORS,
    MAGNITUDE,
    RANKED,
    SECOND_MATRIX,
    SECOND_VECTORS,
    WHOLE,
    Stored,
    digest_of,
    read_content,
    read_entries,
)
from troupellm.models.adapters.settings import MERGE, AdapterSettings, read_settings
from troupellm.models.adapters.sites import EMBEDDING
from troupellm.models.adapters.vocabulary import Vocabulary
from troupellm.models.checkpoint.weight_names import HEAD
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.hub.errors import plain_name
from troupellm.protocol.errors import AdapterError

SiteKey = tuple[int, str]
"""A layer's number (HEAD_LAYER: the head) and the name of one of its sites."""


@dataclass(frozen=True, slots=True)
class PartWeights:
    """The adapter of one projection: x @ down.T @ up.T + bias is added to its result."""

    down: Tensor
    """[rank, in_features]."""
    up: Tensor
    """[width, rank], times the adapter's scale; transposed in memory, as slots of a CPU have it."""
    bias: Tensor | None
    """[width], times the scale."""
    factor: Tensor | None = None
    """[width], by which the base model's result is multiplied before."""

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.down, self.up, self.bias, self.factor) if tensor is not None]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in host memory."""

    digest: str
    rank: int
    """The largest one of a part."""
    sites: dict[SiteKey, tuple[PartWeights | None, ...]]
    """For each part of a site; sites without any are left out."""
    vocabulary: Vocabulary | None = None
    experts: dict[int, ExpertAdapter] = field(default_factory=dict)
    """By layer."""

    @property
    def parts(self) -> list[PartWeights]:
        return [part for parts in self.sites.values() for part in parts if part is not None]

    @property
    def num_bytes(self) -> int:
        held = [*self.parts, *self.experts.values(), *(() if self.vocabulary is None else (self.vocabulary,))]
        return sum(tensor.nbytes for each in held for tensor in each.tensors)


def read_adapter(
    folder: Path,
    model: DecoderConfig,
    max_rank: int,
    dtype: torch.dtype = torch.float32,
    *,
    base: BaseWeights | None = None,
    whole_weights: bool = True,
    experts: bool = True,
) -> Adapter:
    """Read and check a folder of PEFT.

    Args:
        max_rank: largest rank that a slot holds.
        dtype: of the tensors that are returned; products and scales are made in float32 first.
        base: the base model's weights; None: an adapter that needs them is refused.
        whole_weights: an embedding or a head may take the place of the base model's.
        experts: products of experts may have adapters.

    Raises:
        AdapterError: a file is missing, damaged or has changed meanwhile; or a tensor does not fit the model; or the
            adapter has a feature that is not served. Nothing large is read before sizes and names were checked.
    """
    settings, stored = read_settings(folder), read_entries(folder)
    of_experts = [entry for entry in stored if is_of_experts(entry)]
    if of_experts and not experts:
        text = "adapts experts, which is served on a CPU only, and not with --batch-invariant"
        raise AdapterError(f"{FILE}: tensor {plain_name(of_experts[0].name)} {text}", hint=MERGE)
    others = [entry for entry in stored if not is_of_experts(entry)]
    known = check_all(others, model, settings, max_rank, whole_weights=whole_weights)
    expert_parts = check_experts(of_experts, model, settings, max_rank)
    if not stored:
        raise AdapterError(f"{FILE} has no tensors", hint="save the adapter again")
    content = read_content(folder)
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise AdapterError(f"{FILE} cannot be read: {error}", hint="save the adapter again") from error
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {entry.name: entry.shape for entry in stored}:
        raise AdapterError(f"{FILE} has changed while it was read", hint="try again when the files are whole")
    reader = _Reader(tensors, settings, dtype, base)
    sites: dict[SiteKey, list[PartWeights | None]] = {}
    wide: dict[str, Tensor] = {}
    for place, entries in known:
        if (copy := entries.get(COPY)) is not None:
            reader.compare(copy, place)
        if place.site is None or WHOLE in entries:
            wide |= reader.vocabulary(place, entries)
            continue
        parts = sites.setdefault((place.site.layer, place.site.name), [None] * len(place.site.parts))
        parts[place.number] = reader.part(place, entries)
    ranks = [entries[kind].shape[0] for _, entries in known for kind in RANKED if kind in entries]
    return Adapter(
        digest=digest_of(content, settings),
        rank=max((*ranks, *(part.rank for part in expert_parts)), default=0),
        sites={key: tuple(parts) for key, parts in sites.items()},
        vocabulary=Vocabulary(**wide) if wide else None,
        experts=reader.experts(expert_parts, model),
    )


_CHUNK = 1024
"""Rows of a weight whose lengths are computed at once."""


class _Reader:
    """Makes the tensors of an adapter ready for slots."""

    def __init__(
        self, tensors: dict[str, Tensor], settings: AdapterSettings, dtype: torch.dtype, base: BaseWeights | None
    ) -> None:
        self._tensors, self._settings, self._dtype, self._base = tensors, settings, dtype, base

    def part(self, place: Place, entries: Entries) -> PartWeights:
        """The adapter of one projection."""
        first, second = entries[FIRST_MATRIX], entries[SECOND_MATRIX]
        scale = self._settings.scale_of(first.module)
        down, up = self._floats(first), self._floats(second, scale)
        if (length := entries.get(MAGNITUDE)) is None:
            bias = self._ready(entries[BIAS], self._floats(entries[BIAS], scale)) if BIAS in entries else None
            return PartWeights(self._ready(first, down), self._ready(second, up.t()).t(), bias)
        factor, shift = self._factor(place, length, down, up)
        up = self._ready(second, (up * factor[:, None]).t()).t()
        bias = None if shift is None else self._ready(length, shift)
        return PartWeights(self._ready(first, down), up, bias, self._ready(length, factor))

    def vocabulary(self, place: Place, entries: Entries) -> dict[str, Tensor]:
        """Fields of `Vocabulary` for one module."""
        if (whole := entries.get(WHOLE)) is not None:
            name = "embedding" if place.module == EMBEDDING else "head"
            return {name: self._ready(whole, self._floats(whole))}
        first, second = entries[FIRST_VECTORS], entries[SECOND_VECTORS]
        down, up = self._floats(first).t(), self._floats(second, self._settings.scale_of(first.module)).t()
        return {"down": self._ready(first, down), "up": self._ready(second, up)}

    def experts(self, parts: list[ExpertPart], model: DecoderConfig) -> dict[int, ExpertAdapter]:
        """The adapters of experts, by layer."""
        by_layer: dict[int, list[Matrices]] = defaultdict(list)
        for part in parts:
            scale = self._settings.scale_of(part.module)
            down, up = self._floats(part.first), self._floats(part.second, scale)
            by_layer[part.layer].append((part, self._ready(part.first, down), self._ready(part.second, up)))
        return {layer: layer_adapter(found, model) for layer, found in by_layer.items()}

    def compare(self, entry: Stored, place: Place) -> None:
        """A copy of the base model's weight beside its adapter is fine; a trained one is not served."""
        tensor = self._tensors[entry.name]
        rows, columns = tensor.shape
        base = None if self._base is None else self._base.stored(place.module, (rows, columns))
        if base is None or not torch.equal(base.to(tensor.dtype), tensor):
            kind = "head" if place.module == HEAD else "embedding"
            name = plain_name(entry.name)
            raise AdapterError(f"{FILE}: tensor {name} is another {kind} than the base model's", hint=MERGE)

    def _floats(self, entry: Stored, scale: float = 1.0) -> Tensor:
        return self._tensors[entry.name].float() * scale

    def _ready(self, entry: Stored, tensor: Tensor) -> Tensor:
        """A tensor in the type of slots. entry: the one that it is made of."""
        found = tensor.to(self._dtype).contiguous()
        if not math.isfinite(found.abs().amax()):  # NaN counts as the largest
            text = f"{FILE}: tensor {plain_name(entry.name)} has NaN or infinite numbers"
            raise AdapterError(text, hint="train it again")
        return found

    def _factor(self, place: Place, entry: Stored, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of DoRA (Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation"): each row of the adapted weight is
        brought to a length of its own.

        Args:
            entry: the lengths [width].

        Returns:
            the factor of each row, and the bias that makes up for the base model's own, which is not multiplied.
        """
        assert place.site is not None
        shape = (up.shape[0], down.shape[1])
        base = None if self._base is None else self._base.computed(place.module, shape, bias=place.site.bias)
        if base is None:
            text = f"{FILE}: tensor {plain_name(entry.name)} is of DoRA, which needs the base model's stored weights"
            raise AdapterError(text, hint=MERGE)
        weight, bias = base
        lengths = [
            (rows.float() + ups @ down).norm(dim=1)
            for rows, ups in zip(torch.split(weight, _CHUNK), torch.split(up, _CHUNK), strict=True)
        ]
        factor = self._floats(entry) / torch.cat(lengths)
        return factor, None if bias is None else bias.float() * (1.0 - factor)
