"""Checkpoints of NVIDIA's ModelOpt in eight bits: e4m3 with one scale for a weight (FP8), or one per output.

w = value * weight_scale
"""

from troupellm.kernels.quantized_linear import Fp8, Outline, Weight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, KV_CACHE, STATIC_INPUTS, QuantizedCheckpoint
from troupellm.models.quantization.fp8 import TYPES, fp8_outline, whole_scale
from troupellm.models.quantization.layer_patterns import Names
from troupellm.models.quantization.options import ignored_note, only, texts
from troupellm.protocol.errors import ModelLoadError

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_READ = frozenset({"quant_method", "quant_algo", "exclude_modules", "ignore"})
_HARMLESS = frozenset({"producer", "kv_cache_*", "config_groups"})
"""`config_groups` repeats `quant_algo` in the words of compressed-tensors."""


class ModelOpt:
    """A `Format`. The type of a layer's weight shows if the layer is quantized."""

    method = "modelopt"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._notes = ignored_note(reader, only(reader, _READ, _HARMLESS))
        self._weights = reader.is_on("quant_algo")  # else the KV cache alone is quantized
        self._static = reader.choice("quant_algo", ALGORITHMS, ALGORITHMS[0]) == ALGORITHMS[0] and self._weights
        self._kv_cache = reader.is_on("kv_cache_quant_algo") or reader.is_on("kv_cache_scheme")
        excluded = (*texts(reader, "exclude_modules"), *texts(reader, "ignore"))
        self._excluded = Names(excluded, reader.place_of("exclude_modules"), wildcards=True)

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        weight = f"{name}.weight"
        if stored.type_of(weight) in (None, *FLOATS):
            return stored.plain(name, shape)
        if not self._weights or name in self._excluded:
            raise ModelLoadError(f"{weight} has an eight-bit type, though the configuration says that it is plain")
        values, scale = stored.raw(weight, shape, *TYPES), whole_scale(stored, name, shape[0])
        stored.ignore(f"{name}.input_scale")
        return stored.build(name, lambda: Fp8(values, scale, eight_bit_inputs=True, dtype=stored.dtype))

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        if stored.type_of(f"{name}.weight") not in TYPES:
            return None
        return fp8_outline(stored, name, None, eight_bit_inputs=True)

    def notes(self) -> tuple[str, ...]:
        said = ((self._static, STATIC_INPUTS), (self._kv_cache, KV_CACHE))
        return (*self._notes, *(f"modelopt: {note}" for holds, note in said if holds))
