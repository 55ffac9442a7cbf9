"""Checkpoints whose tensors have other names than the decoder asks for."""

from torch import Tensor

from troupellm.kernels.quantized_linear import Weight
from troupellm.models.checkpoint.next_token_tensors import next_token_tensors
from troupellm.models.checkpoint.safetensors import Checkpoint, WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.gguf.weights import GgufWeights

StoredWeights = Checkpoint | GgufWeights
FIRST = "model."
HEAD = "lm_head"
TEXT_PARTS = (("model.language_model.", HEAD), ("language_model.model.", f"language_model.{HEAD}"))
"""Prefixes of a decoder that is one part of a model, and of its head: newer files, older files."""
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class RenamedWeights:
    """A source whose names begin otherwise."""

    def __init__(self, source: WeightSource, beginnings: dict[str, str]) -> None:
        """beginnings: prefixes of requested names, and the checkpoint's prefixes for them."""
        self._source, self._beginnings = source, beginnings

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As `WeightSource.take`."""
        return self._source.take(self._there(name), shape)

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.linear`."""
        return self._source.linear(self._there(name), shape)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.embedding`."""
        return self._source.embedding(self._there(name), shape)

    def tied(self, embedding: Weight) -> Weight:
        """As `WeightSource.tied`."""
        return self._source.tied(embedding)

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """As `WeightSource.stacked`."""
        return self._source.stacked(self._there(name), shape, transposed=transposed)

    def has(self, name: str) -> bool:
        """As `WeightSource.has`."""
        return self._source.has(self._there(name))

    def _there(self, name: str) -> str:
        for asked, there in self._beginnings.items():
            if name.startswith(asked):
                return there + name.removeprefix(asked)
        return name


def decoder_weights(model: DecoderConfig, checkpoint: StoredWeights, embedding: str) -> WeightSource:
    """The checkpoint by the names that a decoder uses; tensors of parts that are not served are ignored.

    Args:
        embedding: a tensor that every decoder has.
    """
    if model.tie_word_embeddings:
        for head in (HEAD, f"language_model.{HEAD}"):
            checkpoint.ignore(f"{head}.weight")
    if isinstance(checkpoint, Checkpoint):
        for name in next_token_tensors(checkpoint.names(), model.num_layers):
            checkpoint.ignore(name)
    if model.text_part:
        for prefix in OTHER_PARTS:
            checkpoint.ignore_all(prefix)
        for body, head in TEXT_PARTS:
            if checkpoint.has(embedding.replace(FIRST, body, 1)):
                return RenamedWeights(checkpoint, {FIRST: body, HEAD: head})
    if model.head == "none" and not checkpoint.has(embedding):  # saved without anything on top
        return RenamedWeights(checkpoint, {FIRST: ""})
    return checkpoint
