"""Checkpoints of NVIDIA's ModelOpt: e4m3 by weight, output or block, NVFP4 and MXFP8, or several of them by layer.

w = value * weight_scale, for NVFP4 times `weight_scale_2`
"""

from troupellm.kernels.quantized_linear import Fp8, Outline, Weight
from troupellm.kernels.quantized_linear.mx import BLOCK
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, KV_CACHE, STATIC_INPUTS, QuantizedCheckpoint
from troupellm.models.quantization.fp8 import TYPES, USUAL_BLOCK, fp8_outline, whole_scale
from troupellm.models.quantization.layer_patterns import Names
from troupellm.models.quantization.mx import mx_outline, mx_weight
from troupellm.models.quantization.nvfp4 import GROUP, MODELOPT, nvfp4_outline, nvfp4_weight
from troupellm.models.quantization.options import MOST_NAMES, ignored_note, only, texts
from troupellm.protocol.errors import ModelLoadError

MIXED = "MIXED_PRECISION"
BLOCKS, MXFP8, FOUR_BITS = "FP8_PB_WO", "MXFP8", ("NVFP4", "W4A16_NVFP4")
EIGHT_BIT_INPUTS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
STATIC = ("FP8", "NVFP4")
"""Algorithms with calibrated scales of the inputs."""
ALGORITHMS = (*EIGHT_BIT_INPUTS, BLOCKS, *FOUR_BITS, MXFP8)
_GROUPS = {"NVFP4": GROUP, "W4A16_NVFP4": GROUP, MXFP8: BLOCK, BLOCKS: USUAL_BLOCK[0]}
_READ = frozenset({"quant_method", "quant_algo", "exclude_modules", "ignore", "group_size", "quantized_layers"})
_HARMLESS = frozenset({"producer", "kv_cache_*", "config_groups"})
"""`config_groups` repeats `quant_algo` in the words of compressed-tensors."""


class ModelOpt:
    """A `QuantizationFormat`.

    The type of a layer's weight shows if the layer is quantized: the list of layers to leave alone is a
    check. Old files name parts of names in it, which others may have, too."""

    method = "modelopt"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._notes = ignored_note(reader, only(reader, _READ, _HARMLESS))
        self._algorithm: str | None = None  # then the KV cache alone is quantized
        self._layers: dict[str, str] = {}
        if reader.is_on("quant_algo") and reader.choice("quant_algo", (*ALGORITHMS, MIXED)) == MIXED:
            self._layers = _by_layer(reader)
        elif reader.is_on("quantized_layers"):
            raise reader.refuse("quantized_layers", f"must be missing unless quant_algo is {MIXED}")
        elif reader.is_on("quant_algo"):
            self._algorithm = _algorithm(reader)
        self._kv_cache = reader.is_on("kv_cache_quant_algo") or reader.is_on("kv_cache_scheme")
        excluded = (*texts(reader, "exclude_modules"), *texts(reader, "ignore"))
        self._excluded = Names(excluded, reader.place_of("exclude_modules"), wildcards=True)

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        weight = f"{name}.weight"
        if stored.type_of(weight) in (None, *FLOATS):
            return stored.plain(name, shape)
        algorithm = self._algorithm_of(name)
        if algorithm is None or name in self._excluded:
            raise ModelLoadError(f"{weight} is quantized, though the configuration says that it is plain")
        stored.ignore(f"{name}.input_scale")
        if algorithm in FOUR_BITS:
            return nvfp4_weight(stored, name, shape, MODELOPT)
        if algorithm == MXFP8:
            return mx_weight(stored, name, shape, "fp8_e4m3")
        eight, block = algorithm in EIGHT_BIT_INPUTS, USUAL_BLOCK if algorithm == BLOCKS else None
        values = stored.raw(weight, shape, *TYPES)
        if block is None:
            scale = whole_scale(stored, name, shape[0])
        else:
            tall, wide = (-(-side // size) for side, size in zip(shape, block, strict=True))
            scale = stored.scalar_or(f"{name}.weight_scale", ((tall, wide), (tall, 1, wide, 1))).float()
        return stored.build(name, lambda: Fp8(values, scale, block=block, eight_bit_inputs=eight, dtype=stored.dtype))

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        if stored.type_of(f"{name}.weight") in (None, *FLOATS):
            return None
        algorithm = self._algorithm_of(name)
        if algorithm in FOUR_BITS:
            return nvfp4_outline(stored, name, MODELOPT)
        if algorithm == MXFP8:
            return mx_outline(stored, name, "fp8_e4m3")
        block, eight = USUAL_BLOCK if algorithm == BLOCKS else None, algorithm in EIGHT_BIT_INPUTS
        return fp8_outline(stored, name, block, eight_bit_inputs=eight)

    def notes(self) -> tuple[str, ...]:
        static = self._algorithm in STATIC or any(algorithm in STATIC for algorithm in self._layers.values())
        said = ((static, STATIC_INPUTS), (self._kv_cache, KV_CACHE))
        return (*self._notes, *(f"modelopt: {note}" for holds, note in said if holds))

    def _algorithm_of(self, name: str) -> str | None:
        """Of several by layer, that of the layer, else of the nearest part of the model around it."""
        while name not in self._layers and "." in name:
            name = name.rpartition(".")[0]
        return self._layers.get(name, self._algorithm)


def _by_layer(reader: ConfigReader) -> dict[str, str]:
    layers = reader.section("quantized_layers")
    if not 0 < len(layers.values) <= MOST_NAMES:
        raise reader.refuse("quantized_layers", f"must name 1 to {MOST_NAMES} layers")
    found = {}
    for name in layers.values:
        layer = layers.section(name)
        only(layer, {"quant_algo", "group_size"})
        found[name] = _algorithm(layer)
    return found


def _algorithm(reader: ConfigReader) -> str:
    """One algorithm, with the group size that it has."""
    algorithm = reader.choice("quant_algo", ALGORITHMS)
    size = _GROUPS.get(algorithm)
    if size is not None and reader.is_on("group_size") and reader.integer("group_size") != size:
        raise reader.refuse("group_size", f"of {algorithm} must be {size}")
    return algorithm
