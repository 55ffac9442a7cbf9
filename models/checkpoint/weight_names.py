"""Checkpoints whose tensors have other names than the decoder asks for."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from troupellm.kernels.quantized_linear import Weight
from troupellm.models.checkpoint.next_token_tensors import next_token_tensors
from troupellm.models.checkpoint.parts import Part
from troupellm.models.checkpoint.safetensors import Checkpoint, WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.gguf.weights import GgufWeights

StoredWeights = Checkpoint | GgufWeights
FIRST = "model."
STATE_SPACES = "backbone."
"""The same in models that are state spaces, most of all."""
HEAD = "lm_head"
TEXT_PARTS = (
    # prefix of the body, name of the head
    ("model.language_model.", HEAD),
    ("language_model.model.", f"language_model.{HEAD}"),
    ("thinker.model.", f"thinker.{HEAD}"),
    ("model.text_model.", HEAD),
    ("llm.model.", f"llm.{HEAD}"),
)
"""Places of a decoder that is one part of a checkpoint."""
OTHER_PARTS = (
    "vision_tower", "vision_model", "visual", "mlp1", "vpm", "resampler", "connector", "multi_modal_projector",
    "mm_projector", "image_newline", "audio_tower", "embed_vision", "embed_audio", "embed_tokens_extend", "talker",
    "token2wav", "code2wav", "mtp", "aligner", "vision_encoder", "vision_projection",
)  # fmt: skip
"""The other parts of such checkpoints, which text alone never reaches."""
WRAPPERS = ("", "model.", "thinker.")
"""Prefixes that those names may have."""
ADAPTED, ADAPTERS = ".base_layer", (".lora_A.", ".lora_B.")
"""A layer within its adapters for images and sound, and these adapters, which text does not go through."""


class StoredNames(NamedTuple):
    """The checkpoint's names for those that a decoder asks for."""

    body: str = FIRST
    """Prefix of everything but the head."""
    head: str = ""
    """Prefix of the head."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names, and what the checkpoint has for them."""
    adapted: frozenset[str] = frozenset()
    """Layers, by the checkpoint's names, that stand within their adapters."""

    def of(self, name: str) -> str:
        """A tensor's or a layer's name in the checkpoint."""
        found = self.body + name.removeprefix(FIRST) if name.startswith(FIRST) else self.head + name
        for ours, theirs in self.renamed:
            found = found.replace(ours, theirs)
        if not self.adapted:
            return found
        layer, _, last = found.rpartition(".")
        if found in self.adapted:
            return found + ADAPTED
        return f"{layer}{ADAPTED}.{last}" if layer in self.adapted else found

    def asked(self, name: str) -> str:
        """The name that a decoder asks for, of a tensor of the checkpoint's body or head."""
        if name.startswith(self.body):
            return FIRST + name.removeprefix(self.body)
        return name.removeprefix(self.head)


class RenamedWeights:
    """A source that has other names."""

    def __init__(self, source: WeightSource, name_of: Callable[[str], str]) -> None:
        """name_of: gives the source's name for one that is asked for."""
        self._source, self._name_of = source, name_of

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As `WeightSource.take`."""
        return self._source.take(self._name_of(name), shape)

    def take_part(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """As `PartSource.take_part`, of a checkpoint's plain tensors."""
        assert isinstance(self._source, Checkpoint)
        return self._source.take_part(self._name_of(name), shape, part)

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.linear`."""
        return self._source.linear(self._name_of(name), shape)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.embedding`."""
        return self._source.embedding(self._name_of(name), shape)

    def tied(self, embedding: Weight) -> Weight:
        """As `WeightSource.tied`."""
        return self._source.tied(embedding)

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """As `WeightSource.stacked`."""
        return self._source.stacked(self._name_of(name), shape, transposed=transposed)

    def has(self, name: str) -> bool:
        """As `WeightSource.has`."""
        return self._source.has(self._name_of(name))


def with_prefixes(prefixes: Mapping[str, str]) -> Callable[[str], str]:
    """A renaming of the beginnings of names. prefixes: as asked for, and as stored."""

    def name_of(name: str) -> str:
        asked = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        return name if asked is None else prefixes[asked] + name.removeprefix(asked)

    return name_of


def stored_names(model: DecoderConfig, stored: StoredWeights, embedding: str) -> StoredNames:
    """The names under which a checkpoint has the decoder.

    Args:
        embedding: a tensor that every decoder has.
    """
    if not isinstance(stored, Checkpoint):  # a GGUF file has names of its own, which its reader maps
        return StoredNames()
    adapted: frozenset[str] = frozenset()
    if model.text_part:
        adapted = frozenset(name.partition(ADAPTED)[0] for name in stored.names() if f"{ADAPTED}." in name)
    usual = StoredNames(renamed=model.renamed, adapted=adapted)
    places = [*(TEXT_PARTS if model.text_part else ()), (FIRST, HEAD), (STATE_SPACES, HEAD), ("", HEAD)]
    candidates = [usual._replace(body=body, head=head.removesuffix(HEAD)) for body, head in places]
    return next((names for names in candidates if stored.has(names.of(embedding))), usual)


def decoder_weights(model: DecoderConfig, checkpoint: StoredWeights, embedding: str) -> WeightSource:
    """The checkpoint by the names that a decoder uses; tensors of parts that are not served are ignored.

    Args:
        embedding: a tensor that every decoder has.
    """
    names = stored_names(model, checkpoint, embedding)
    if model.tie_word_embeddings:
        checkpoint.ignore(f"{names.of(HEAD)}.weight")
    for layer in (layer for layer, shape in enumerate(model.layers) if shape.kv_from is not None):
        for part in ("k_proj", "v_proj", "k_norm"):  # which files may have all the same
            weight = names.of(f"model.layers.{layer}.self_attn.{part}.weight")
            if isinstance(checkpoint, Checkpoint):
                checkpoint.ignore_all(weight.removesuffix("weight"))  # with their biases and scales
            else:
                checkpoint.ignore(weight)
    if isinstance(checkpoint, Checkpoint):
        for layer in range(model.num_layers if model.sparse_keys else 0):
            checkpoint.ignore_all(names.of(f"model.layers.{layer}.self_attn.indexer."))
        unused = next_token_tensors(checkpoint.names(), model.num_layers)
        if model.text_part:
            unused += [name for name in checkpoint.names() if is_other_part(name, within_adapters=bool(names.adapted))]
        for name in unused:
            checkpoint.ignore(name)
    return checkpoint if names == StoredNames() else RenamedWeights(checkpoint, names.of)


def is_other_part(name: str, *, within_adapters: bool = False) -> bool:
    """True for a tensor of a part that text does not reach; within_adapters: whether adapters are such a part."""
    if within_adapters and any(mark in name for mark in ADAPTERS):
        return True
    own = (name.removeprefix(wrapper).partition(".")[0] for wrapper in WRAPPERS if name.startswith(wrapper))
    return any(part in OTHER_PARTS for part in own)
