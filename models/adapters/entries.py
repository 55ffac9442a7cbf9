"""The places of an adapter's tensors in a decoder, and a refusal of each tensor that has none."""

from dataclasses import dataclass

from troupellm.models.adapters.files import (
    BIAS,
    COPY,
    FILE,
    FIRST_MATRIX,
    FIRST_VECTORS,
    MAGNITUDE,
    SECOND_MATRIX,
    SECOND_VECTORS,
    WHOLE,
    Stored,
)
from troupellm.models.adapters.settings import MERGE, AdapterSettings
from troupellm.models.adapters.sites import EMBEDDING, Site, decoder_sites, plain_module
from troupellm.models.checkpoint.weight_names import HEAD
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.hub.errors import plain_name
from troupellm.protocol.errors import AdapterError

Entries = dict[str, Stored]
"""The tensors of one module, by kind."""


@dataclass(frozen=True, slots=True)
class Place:
    """One module of the decoder that an adapter changes."""

    module: str
    """Name within the decoder, without "model."."""
    shape: tuple[int, int]
    """Of its weight: outputs and inputs; of the embedding the vocabulary and the hidden size."""
    site: Site | None
    """None for the embedding, which is no product."""
    number: int
    """Of the site's part."""


def check_all(
    stored: list[Stored], model: DecoderConfig, settings: AdapterSettings, max_rank: int, *, whole_weights: bool
) -> list[tuple[Place, Entries]]:
    """The tensors of each module, after all names and shapes were checked.

    Args:
        max_rank, whole_weights: as of `read_adapter`.

    Raises:
        AdapterError: a tensor has no place, or not the shape that it must have.
    """
    places = _places(model)
    known: dict[str, Entries] = {}
    for entry in stored:
        module = plain_module(entry.module)
        if module not in places:
            raise _unknown(entry)
        entries = known.setdefault(module, {})
        other = entries.get(entry.kind) or (entries and (entry.kind == WHOLE or entries.get(WHOLE)))
        if other:
            first = plain_name(next(iter(entries.values())).name)
            raise AdapterError(f"{FILE}: tensor {plain_name(entry.name)} is for the same module as {first}")
        entries[entry.kind] = entry
    for module, entries in known.items():
        _check_module(entries, places[module], settings, max_rank)
    _check_vocabulary(known, model, settings, whole_weights=whole_weights)
    return [(places[module], entries) for module, entries in known.items()]


def _places(model: DecoderConfig) -> dict[str, Place]:
    found = {
        part.module: Place(part.module, (part.width, site.in_features), site, number)
        for site in decoder_sites(model)
        for number, part in enumerate(site.parts)
        if not (site.name == "qkv" and model.qkv_by_group)  # whose outputs lie in another order here
    }
    return found | {EMBEDDING: Place(EMBEDDING, (model.vocab_size, model.hidden_size), None, 0)}


def _check_module(entries: Entries, place: Place, settings: AdapterSettings, max_rank: int) -> None:
    """Refuse a module that misses a tensor, or has one of another shape than the base model's weight and the rank."""
    some = next(iter(entries.values()))
    outputs, inputs = place.shape
    rank = settings.rank_of(some.module)
    if place.site is None:
        shapes: dict[str, tuple[int, ...]] = {FIRST_VECTORS: (rank, outputs), SECOND_VECTORS: (inputs, rank)}
    else:
        shapes = {FIRST_MATRIX: (rank, inputs), SECOND_MATRIX: (outputs, rank)}
        shapes |= {BIAS: (outputs,)} if settings.bias else {}
        shapes |= {MAGNITUDE: (outputs,)} if settings.dora and place.module != HEAD else {}
    wanted = {WHOLE} if WHOLE in entries else shapes.keys()
    for kind in sorted(wanted - entries.keys()):
        raise AdapterError(f"{FILE}: {plain_name(some.name)} has no {kind.removeprefix('.')} beside it")
    if WHOLE not in entries:
        settings.checked_rank(some.module, max_rank)
    wide = place.module in (EMBEDDING, HEAD)
    shapes |= {COPY: place.shape, WHOLE: place.shape} if wide else {}
    for kind, entry in entries.items():
        if kind not in shapes:
            raise _misplaced(kind, entry)
        if entry.shape != shapes[kind]:
            raise AdapterError(
                f"{FILE}: tensor {plain_name(entry.name)} has shape {list(entry.shape)}, expected "
                f"{list(shapes[kind])} for this model and rank {rank}"
            )


def _misplaced(kind: str, entry: Stored) -> AdapterError:
    """The refusal of a tensor that its module cannot have, or not with these settings."""
    name = plain_name(entry.name)
    if kind == BIAS:
        return AdapterError(f"{FILE}: tensor {name} is a bias, but lora_bias is false")
    if kind == MAGNITUDE:
        text = "is of DoRA, but use_dora is false, or of a module for which DoRA is not served"
        return AdapterError(f"{FILE}: tensor {name} {text}", hint=MERGE)
    if kind in (COPY, WHOLE):
        return AdapterError(
            f"{FILE}: tensor {name} is a whole weight, which only embedding and head may be", hint=MERGE
        )
    return AdapterError(f"{FILE}: tensor {name} is not one of this module's", hint=MERGE)


def _check_vocabulary(
    known: dict[str, Entries], model: DecoderConfig, settings: AdapterSettings, *, whole_weights: bool
) -> None:
    """Refuse embeddings and heads that this place or this model cannot have."""
    for module in (EMBEDDING, HEAD):
        entries = known.get(module, {})
        some = next(iter(entries.values()), None)
        if some is None:
            continue
        if settings.ties and model.tie_word_embeddings:
            text = "is shared with the head (ensure_weight_tying), which is not served"
            raise AdapterError(f"{FILE}: tensor {plain_name(some.name)} {text}", hint=MERGE)
        if WHOLE in entries and not whole_weights:
            text = "is a whole weight (modules_to_save), which is served on a CPU only"
            raise AdapterError(f"{FILE}: tensor {plain_name(some.name)} {text}", hint=MERGE)
        if module == HEAD and WHOLE in entries and (model.head_bias or model.head_normed):
            text = "replaces a head with a bias or a norm, which is not served"
            raise AdapterError(f"{FILE}: tensor {plain_name(some.name)} {text}", hint=MERGE)


def _unknown(entry: Stored) -> AdapterError:
    """The refusal of a tensor for which the decoder has no place."""
    name = plain_name(entry.name)
    if entry.kind == WHOLE:
        text = "is a whole weight (modules_to_save), which only embedding and head may be"
        return AdapterError(f"{FILE}: tensor {name} {text}", hint=MERGE)
    return AdapterError(
        f"{FILE}: tensor {name} is for a module that this model does not have, or that takes no adapter",
        hint="serve it with the base model that it was trained on",
    )
