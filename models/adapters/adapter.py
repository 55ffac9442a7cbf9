"""Reads an adapter strictly: every tensor has its place in the decoder, and no place has half an adapter."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from troupellm.models.adapters.files import (
    BIAS,
    FILE,
    FIRST_MATRIX,
    SECOND_MATRIX,
    Stored,
    digest_of,
    read_content,
    read_entries,
)
from troupellm.models.adapters.settings import MERGE, AdapterSettings, read_settings
from troupellm.models.adapters.sites import Part, Site, decoder_sites, plain_module
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
    """[width, rank], times the adapter's scale."""
    bias: Tensor | None
    """[width], times the scale."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in host memory."""

    digest: str
    rank: int
    """The largest one of a part."""
    sites: dict[SiteKey, tuple[PartWeights | None, ...]]
    """For each part of a site; sites without any are left out."""

    @property
    def num_bytes(self) -> int:
        return sum(
            tensor.nbytes
            for parts in self.sites.values()
            for part in parts
            if part is not None
            for tensor in (part.down, part.up, part.bias)
            if tensor is not None
        )


def read_adapter(
    folder: Path,
    model: DecoderConfig,
    max_rank: int,
    dtype: torch.dtype = torch.float32,
    *,
    head_weight: Callable[[], Tensor | None] | None = None,
) -> Adapter:
    """Read and check a folder of PEFT.

    Args:
        max_rank: largest rank that a slot holds.
        dtype: of the tensors that are returned; products and scales are made in float32 first.
        head_weight: the base model's head [vocab, hidden], which a file may hold beside an adapter of the head; None:
            such a file is refused.

    Raises:
        AdapterError: a file is missing, damaged or has changed meanwhile; or a tensor does not fit the model; or the
            adapter has a feature that is not served. Nothing large is read before sizes and names were checked.
    """
    settings = read_settings(folder)
    places = {
        part.module: (site, number)
        for site in decoder_sites(model)
        for number, part in enumerate(site.parts)
        if not (site.name == "qkv" and model.qkv_by_group)  # whose outputs lie in another order here
    }
    known = _check_all(read_entries(folder), places, settings, max_rank)
    content = read_content(folder)
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise AdapterError(f"{FILE} cannot be read: {error}", hint="save the adapter again") from error
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {
        entry.name: entry.shape for entries in known.values() for entry in entries.values()
    }:
        raise AdapterError(f"{FILE} has changed while it was read", hint="try again when the files are whole")
    sites: dict[SiteKey, list[PartWeights | None]] = {}
    for module, entries in known.items():
        site, number = places[module]
        parts = sites.setdefault((site.layer, site.name), [None] * len(site.parts))
        parts[number] = _weights(entries, tensors, settings, dtype)
        if (base := entries.get(_WHOLE)) is not None:
            _check_head(base, tensors[base.name], head_weight)
    ranks = [part.down.shape[0] for parts in sites.values() for part in parts if part is not None]
    digest = digest_of(content, settings)
    return Adapter(digest, max(ranks), {key: tuple(parts) for key, parts in sites.items()})


_WHOLE = ".base_layer.weight"
_Entries = dict[str, Stored]
"""The tensors of one module, by kind."""


def _check_all(
    stored: list[Stored], places: dict[str, tuple[Site, int]], settings: AdapterSettings, max_rank: int
) -> dict[str, _Entries]:
    """The tensors of each module of the decoder, after all names and shapes were checked."""
    known: dict[str, _Entries] = {}
    for entry in stored:
        module = plain_module(entry.module)
        if module not in places:
            raise _unknown(entry)
        entries = known.setdefault(module, {})
        if entry.kind in entries:
            first = plain_name(entries[entry.kind].name)
            raise AdapterError(f"{FILE}: tensor {plain_name(entry.name)} is for the same module as {first}")
        entries[entry.kind] = entry
    if not known:
        raise AdapterError(f"{FILE} has no tensors", hint="save the adapter again")
    for module, entries in known.items():
        site, number = places[module]
        _check_module(entries, site, site.parts[number], settings, max_rank)
    return known


def _check_module(entries: _Entries, site: Site, part: Part, settings: AdapterSettings, max_rank: int) -> None:
    """Refuse a module that misses a tensor, or has one of another shape than the base model's weight and the rank."""
    some = next(iter(entries.values()))
    wanted = {FIRST_MATRIX, SECOND_MATRIX} | ({BIAS} if settings.bias else set())
    for kind in sorted(wanted - entries.keys()):
        raise AdapterError(f"{FILE}: {plain_name(some.name)} has no {kind.removeprefix('.')} beside it")
    rank = settings.rank_of(some.module)
    if rank > max_rank:
        raise AdapterError(
            f"the adapter has rank {rank} at {plain_name(some.module)}, this server takes at most {max_rank}",
            hint=f"start it with --max-lora-rank {rank}",
        )
    shapes = {
        FIRST_MATRIX: (rank, site.in_features),
        SECOND_MATRIX: (part.width, rank),
        BIAS: (part.width,),
        _WHOLE: (part.width, site.in_features),
    }
    for kind, entry in entries.items():
        if kind == BIAS and not settings.bias:
            raise AdapterError(f"{FILE}: tensor {plain_name(entry.name)} is a bias, but lora_bias is false")
        if kind == _WHOLE and part.module != HEAD:
            raise AdapterError(f"{FILE}: tensor {plain_name(entry.name)} is a whole weight", hint=MERGE)
        if entry.shape != shapes[kind]:
            raise AdapterError(
                f"{FILE}: tensor {plain_name(entry.name)} has shape {list(entry.shape)}, expected "
                f"{list(shapes[kind])} for this model and rank {rank}"
            )


def _unknown(entry: Stored) -> AdapterError:
    """The refusal of a tensor for which the decoder has no place."""
    name = plain_name(entry.name)
    if ".experts." in entry.module or entry.module.endswith(".experts"):
        return AdapterError(f"{FILE}: tensor {name} adapts experts, which is not served", hint=MERGE)
    if entry.module.endswith("embed_tokens"):
        return AdapterError(f"{FILE}: tensor {name} adapts an embedding, which is not served", hint=MERGE)
    return AdapterError(
        f"{FILE}: tensor {name} is for a module that this model does not have, or that takes no adapter",
        hint="serve it with the base model that it was trained on",
    )


def _weights(
    entries: _Entries, tensors: dict[str, Tensor], settings: AdapterSettings, dtype: torch.dtype
) -> PartWeights:
    scale = settings.scale_of(entries[FIRST_MATRIX].module)
    factors = {FIRST_MATRIX: 1.0, SECOND_MATRIX: scale, BIAS: scale}
    found = {}
    for kind, entry in entries.items():
        if kind != _WHOLE:
            found[kind] = (tensors[entry.name].float() * factors[kind]).to(dtype)
            if not bool(torch.isfinite(found[kind]).all()):
                text = f"{FILE}: tensor {plain_name(entry.name)} has NaN or infinite numbers"
                raise AdapterError(text, hint="train it again")
    return PartWeights(found[FIRST_MATRIX], found[SECOND_MATRIX], found.get(BIAS))


def _check_head(entry: Stored, tensor: Tensor, head_weight: Callable[[], Tensor | None] | None) -> None:
    """A copy of the base model's head beside its adapter is fine; a trained one is not served."""
    base = None if head_weight is None else head_weight()
    if base is None or base.shape != tensor.shape or not torch.equal(base.to(tensor.dtype), tensor):
        name = plain_name(entry.name)
        raise AdapterError(f"{FILE}: tensor {name} is another head than the base model's", hint=MERGE)
