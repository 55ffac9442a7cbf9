"""Checkpoints whose tensors are quantized although no file says how."""

from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.config.quantization_section import FILES, KEY
from troupellm.models.hub.errors import plain_name
from troupellm.protocol.errors import ModelLoadError

PACKED = (
    ".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".absmax",
    ".quant_map", ".SCB",
)  # fmt: skip
"""Ends of names that every quantized layer has, by some tool."""


def check_plain(stored: Checkpoint) -> None:
    """
    Args:
        stored: a checkpoint without a quantization section.

    Raises:
        ModelLoadError: it is stored quantized.
    """
    packed = next((name for name in stored.names() if name.endswith(PACKED)), None)
    if packed is not None:
        raise ModelLoadError(
            f"{plain_name(packed)} is stored quantized, and no file says how",
            hint=f"add {KEY} to config.json, or the file of the tool that made it: {', '.join(FILES)}",
        )
