"""Chooses the reader for a `quantization_config`."""

from collections.abc import Callable

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.config.quantization_section import KEY, METHOD, OLDER_KEY
from troupellm.models.quantization.autoround import AutoRound
from troupellm.models.quantization.awq import Awq
from troupellm.models.quantization.bitsandbytes import BitsAndBytes
from troupellm.models.quantization.checkpoint import Format
from troupellm.models.quantization.compressed_tensors import CompressedTensors
from troupellm.models.quantization.fp8 import Fp8Format
from troupellm.models.quantization.gptq import Gptq
from troupellm.models.quantization.modelopt import ModelOpt
from troupellm.models.quantization.mx import Mxfp4
from troupellm.models.quantization.quark import Quark
from troupellm.protocol.errors import ModelLoadError

INSTEAD = "serve the checkpoint that it was made from; --quantization int8, int4 or fp8 quantizes it while it is read"
METHODS: dict[str, Callable[[ConfigReader], Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "fp8": Fp8Format,
    "quark": Quark,
    "mxfp4": Mxfp4,
    "modelopt": ModelOpt,
    "auto-round": AutoRound,
    "bitsandbytes": BitsAndBytes,
}


def read_format(reader: ConfigReader) -> Format | None:
    """How the checkpoint's weights are quantized; None where they are not.

    Raises:
        ModelLoadError: a method or a setting that is not supported, by its key.
    """
    key = next((key for key in (KEY, OLDER_KEY) if reader.has(key)), None)
    if key is None:
        return None
    section = reader.section(key)
    try:
        return METHODS[section.choice(METHOD, tuple(METHODS))](section)
    except ModelLoadError as error:
        raise ModelLoadError(error.message, hint=error.hint or INSTEAD) from error
