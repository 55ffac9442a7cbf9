"""The products of a decoder that adapters may change, and the modules of PEFT that belong to them.

Projections of the same input are one product here (`models.layers.projections`), so its site has several parts.
"""

from dataclasses import dataclass

from troupellm.models.checkpoint.weight_names import FIRST, HEAD, TEXT_PARTS
from troupellm.models.config.decoder_config import DecoderConfig

EMBEDDING = "embed_tokens"
HEAD_LAYER = -1
"""Stands for a layer's number at the head's site."""
_BODIES = (*(body for body, _ in TEXT_PARTS), FIRST, "")
"""Beginnings of names within a model: as the language part of another one, alone, and without a head."""
_HEADS = frozenset({HEAD, *(head for _, head in TEXT_PARTS)})


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a site."""

    module: str
    """Name within the decoder, without "model."."""
    begin: int
    """Its first output among those of the site."""
    width: int


@dataclass(frozen=True, slots=True)
class Site:
    """One product, [in_features] to [out_features]."""

    layer: int
    name: str
    """qkv, out, gate_up, down or head."""
    in_features: int
    parts: tuple[Part, ...]
    bias: bool = False
    """The base model's product has a bias."""

    @property
    def out_features(self) -> int:
        return self.parts[-1].begin + self.parts[-1].width


def decoder_sites(model: DecoderConfig) -> tuple[Site, ...]:
    """All sites of a decoder, layer by layer. Latent attention and experts have none."""
    found = []
    for layer, shape in enumerate(model.layers):
        block, size = f"layers.{layer}", model.hidden_size
        if model.mla is None:
            attention = f"{block}.self_attn"
            qkv = model.query_key_value(shape)
            found.append(_site(layer, "qkv", size, attention, qkv, bias=model.qkv_bias))
            found.append(_site(layer, "out", shape.mixed_width, attention, {"o_proj": size}, bias=model.out_bias))
        if shape.experts is None or shape.experts.beside_dense:
            inner = shape.intermediate_size
            found.append(_site(layer, "gate_up", size, f"{block}.mlp", model.gate_up(inner), bias=model.mlp_bias))
            found.append(_site(layer, "down", inner, f"{block}.mlp", {"down_proj": size}, bias=model.mlp_bias))
    if model.head == "lm":
        found.append(Site(HEAD_LAYER, "head", model.hidden_size, (Part(HEAD, 0, model.vocab_size),)))
    return tuple(found)


def _site(layer: int, name: str, in_features: int, prefix: str, widths: dict[str, int], *, bias: bool) -> Site:
    parts, begin = [], 0
    for part, width in widths.items():
        parts.append(Part(f"{prefix}.{part}", begin, width))
        begin += width
    return Site(layer, name, in_features, tuple(parts), bias)


def plain_module(module: str) -> str:
    """The name of a module within the decoder alone. Of another part of a model: as it is.

    Args:
        module: its name within the base model, whose language part the decoder may be.
    """
    if module in _HEADS:
        return HEAD
    body = next(body for body in _BODIES if module.startswith(body))
    return module.removeprefix(body)


def adapter_bytes(model: DecoderConfig, rank: int, itemsize: int) -> int:
    """Bytes of an adapter of that rank on all sites and the embedding."""
    numbers = sum(rank * (len(site.parts) * site.in_features + site.out_features) for site in decoder_sites(model))
    return numbers * itemsize + vocabulary_bytes(model, rank, itemsize)


def vocabulary_bytes(model: DecoderConfig, rank: int, itemsize: int) -> int:
    """Bytes of an embedding's adapter of that rank."""
    return rank * (model.vocab_size + model.hidden_size) * itemsize
