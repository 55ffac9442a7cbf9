"""Decides which head a model has: its embedding, a tensor of its own, or none.

config.json says if the head is the embedding, unless a checkpoint stores both and they differ. Fine-tuning and merging
leave such checkpoints. `transformers` does not tie differing weights either (`tie_weights`). A head that is stored
quantized is used as well: the quantization tool made it from the embedding. A body that was saved alone, with names
that begin below `model.`, has no head: it embeds (Qwen3-Embedding-8B).
"""

from pathlib import Path

import msgspec
import torch

from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import FIRST, HEAD, stored_names
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.layers.decoder import EMBEDDING
from troupellm.models.quantization.unsaid import PACKED
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink


def settle_head(folder: Path, model: DecoderConfig, progress: ProgressSink) -> DecoderConfig:
    """The description; untied if the checkpoint stores a head that is quantized or differs from the embedding, and
    without a head if it stores a body alone.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    if model.head != "lm" or is_gguf(folder):  # a GGUF file either has a head or not
        return model
    stored = Checkpoint(folder, torch.float32)
    names = stored_names(model, stored, EMBEDDING)
    embedding, head = names.of(EMBEDDING), names.of(HEAD)
    packed = [f"{head}{end}" for end in PACKED if stored.has(f"{head}{end}")]

    def note(text: str) -> None:
        progress(LoadProgress(phase="resolve", detail=text))

    if not model.tie_word_embeddings:
        if names.body or packed or stored.has(f"{head}.weight"):
            return model
        note(f"there is no {head}.weight and no name begins with {FIRST}: the model embeds and does not write")
        return msgspec.structs.replace(model, head="none")
    pair = embedding, f"{head}.weight"
    if stored.has(embedding) and packed:
        note(f"{packed[0]} is used: the head is stored quantized, although tie_word_embeddings is true")
    elif not all(map(stored.has, pair)) or stored.equal(*pair):
        return model
    elif stored.shape_of(embedding) != stored.shape_of(pair[1]):
        note(f"{pair[1]} is not used: it has another shape than the embedding")
        return model
    else:
        note(f"{pair[1]} is used: it is not the embedding, although tie_word_embeddings says so")
    return msgspec.structs.replace(model, tie_word_embeddings=False)
