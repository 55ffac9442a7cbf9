"""Checkpoints of drafters: opens them, measures their size, and recognises their method by their content."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import torch

from troupellm.models.checkpoint.safetensors import Checkpoint, WeightSource
from troupellm.models.checkpoint.weight_names import RenamedWeights, with_prefixes
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.weight_files import SINGLE
from troupellm.models.load.read_decoder import stored_format
from troupellm.models.load.to_device import OnDevice
from troupellm.models.memory.drafter_needs import MARK_NUMBERS, DrafterNeeds, Target
from troupellm.models.memory.stored_size import checkpoint_bytes
from troupellm.models.proposers.paged_pending_states import KEPT
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.speculation import Method, SpeculativeConfig
from troupellm.protocol.errors import ModelLoadError

MEDUSA_FILE: Final = "medusa_lm_head.safetensors"
"""The file name of Medusa's own checkpoints."""


def refuse(text: str, hint: str = "") -> ModelLoadError:
    """The error for a drafter that does not fit; its text says that it is about the drafter."""
    return ModelLoadError(f"speculative_config: {text}", hint=hint)


def reading(config: SpeculativeConfig, target: Target) -> ModelConfig:
    """The settings with which a drafter is read: those of its target, except where the speculative config differs."""
    return msgspec.structs.replace(target.model, quantization=config.quantization, load_format="auto")


def open_head(
    folder: Path, reader: ConfigReader, config: SpeculativeConfig, target: Target, taken: Callable[[int], None]
) -> Checkpoint:
    """The tensors of a head.

    Raises:
        ModelLoadError: a file is missing or damaged, or is a GGUF file.
    """
    if is_gguf(folder):
        raise refuse(f"{folder.name} is a GGUF file, which no heads come in", "name a folder with safetensors")
    form = stored_format(folder, reader, reading(config, target))
    files = (MEDUSA_FILE,) if (folder / MEDUSA_FILE).is_file() and not (folder / SINGLE).is_file() else ()
    if form is not None:
        return QuantizedCheckpoint(folder, target.dtype, taken, form)
    return Checkpoint(folder, target.dtype, taken, files)


def needs_of(stored: Checkpoint, layers: DecoderConfig, target: Target, prefix: str = "") -> DrafterNeeds:
    """The memory needs of decoder layers that read the target's hidden states.

    Args:
        prefix: how the names of their tensors begin.
    """
    size = layers.hidden_size
    return DrafterNeeds(
        weight_bytes=checkpoint_bytes(stored, target.dtype, target.device, prefix),
        layers=layers,
        width=KEPT * size,
        shown=target.config.hidden_size,
        border=size + MARK_NUMBERS,
    )


def source_of(
    stored: Checkpoint, config: SpeculativeConfig, names: dict[str, str], device: torch.device
) -> WeightSource:
    """The source from which layers take their weights, on the device.

    Args:
        names: prefixes of names that layers ask for, and the checkpoint's prefixes for them.
    """
    source: WeightSource = RenamedWeights(stored, with_prefixes(names))
    if device.type != "cpu":
        source = OnDevice(source, device)
    return source if config.quantization is None else QuantizeOnLoad(source, config.quantization)


def method_of(folder: Path) -> Method:
    """Which method a folder's checkpoint is for, by its tensors.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    if is_gguf(folder):
        return "draft_model"
    if (folder / MEDUSA_FILE).is_file():
        return "medusa"
    names = {name.removeprefix("model.") for name in Checkpoint(folder, torch.float32).names()}
    if any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    if "fc.weight" in names:
        return "eagle"
    return "medusa" if {"0.0.linear.weight", "blocks.0.layers.0.weight"} & names else "draft_model"
