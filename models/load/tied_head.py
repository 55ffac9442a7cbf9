"""Decides if a model's head is its embedding: config.json says so, unless a checkpoint stores both and they differ.

Fine-tuning and merging leave such checkpoints. `transformers` does not tie differing weights either (`tie_weights`). A
head that is stored quantized is used as well: the quantization tool made it from the embedding.
"""

from pathlib import Path

import msgspec
import torch

from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import FIRST, HEAD, TEXT_PARTS
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.layers.decoder import EMBEDDING
from troupellm.models.quantization.unsaid import PACKED
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

PLACES = ((FIRST, HEAD), *TEXT_PARTS)


def settle_head(folder: Path, model: DecoderConfig, progress: ProgressSink) -> DecoderConfig:
    """The description, untied if the checkpoint stores a head that is quantized or differs from the embedding.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    if not model.tie_word_embeddings or model.head != "lm" or is_gguf(folder):  # a GGUF file either has a head or not
        return model
    stored = Checkpoint(folder, torch.float32)
    for body, head in PLACES:
        pair = EMBEDDING.replace(FIRST, body, 1), f"{head}.weight"
        packed = [f"{head}{end}" for end in PACKED if stored.has(f"{head}{end}")]
        if stored.has(pair[0]) and packed:
            note = f"{packed[0]} is used: the head is stored quantized, although tie_word_embeddings is true"
            progress(LoadProgress(phase="resolve", detail=note))
            return msgspec.structs.replace(model, tie_word_embeddings=False)
        if not all(map(stored.has, pair)) or stored.equal(*pair):
            continue
        if stored.shape_of(pair[0]) != stored.shape_of(pair[1]):
            note = f"{pair[1]} is not used: it has another shape than the embedding"
            progress(LoadProgress(phase="resolve", detail=note))
            continue
        note = f"{pair[1]} is used: it is not the embedding, although tie_word_embeddings says so"
        progress(LoadProgress(phase="resolve", detail=note))
        return msgspec.structs.replace(model, tie_word_embeddings=False)
    return model
