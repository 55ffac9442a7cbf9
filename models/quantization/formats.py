"""Chooses the reader for a `quantization_config`."""

from collections.abc import Callable
from typing import Any, Final

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.config.quantization_section import KEY, METHOD, OLDER_KEY
from troupellm.models.hub.plug_ins import find_plug_in, plug_in_error, plug_in_names
from troupellm.models.quantization.autoround import AutoRound
from troupellm.models.quantization.awq import Awq
from troupellm.models.quantization.bitsandbytes import BitsAndBytes
from troupellm.models.quantization.checkpoint import QuantizationFormat
from troupellm.models.quantization.compressed_tensors import CompressedTensors
from troupellm.models.quantization.fp8 import Fp8Format
from troupellm.models.quantization.gptq import Gptq
from troupellm.models.quantization.modelopt import ModelOpt
from troupellm.models.quantization.mx import Mxfp4
from troupellm.models.quantization.quark import Quark
from troupellm.protocol.errors import ModelLoadError

INSTEAD = "serve the checkpoint that it was made from; --quantization int8, int4 or fp8 quantizes it while it is read"
GROUP: Final = "troupellm.quantization"
"""Entry points of further formats: the name of a `quant_method`, and a class that is made like those below."""
_CALLS = ("linear", "outline", "notes")
METHODS: dict[str, Callable[[ConfigReader], QuantizationFormat]] = {
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


def read_format(reader: ConfigReader) -> QuantizationFormat | None:
    """How the checkpoint's weights are quantized; None where they are not.

    Raises:
        ModelLoadError: a method or a setting that is not supported, by its key.
    """
    key = next((key for key in (KEY, OLDER_KEY) if reader.has(key)), None)
    if key is None:
        return None
    section = reader.section(key)
    method = section.values.get(METHOD)
    if isinstance(method, str) and method not in METHODS and (plug_in := find_plug_in(GROUP, method)) is not None:
        return _made(plug_in, method, section)
    try:
        return METHODS[section.choice(METHOD, (*METHODS, *plug_in_names(GROUP)))](section)
    except ModelLoadError as error:
        raise ModelLoadError(error.message, hint=error.hint or INSTEAD) from error


def _made(plug_in: Callable[[ConfigReader], Any], method: str, section: ConfigReader) -> QuantizationFormat:
    """A plug-in's reader.

    Raises:
        ModelLoadError: the plug-in refuses the section, fails, or gives something else.
    """
    try:
        form = plug_in(section)
    except Exception as error:  # a plug-in may raise anything
        raise plug_in_error(GROUP, method, error) from error
    missing = [call for call in _CALLS if not callable(getattr(form, call, None))]
    if missing or not isinstance(getattr(form, "method", None), str):
        raise ModelLoadError(f"the plug-in {method} of {GROUP} has no {', '.join(missing) or 'method'}")
    found: QuantizationFormat = form
    return found
