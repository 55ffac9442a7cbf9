"""Checkpoints of AMD Quark: a scheme for all layers, others for layers by name, and a list of layers to leave alone.

fp8 and int8 have one scale for a weight or one per output; fp4 and fp6 are microscaling formats. Inputs are in eight
bits only where they are to be of the weight's own type.
"""

from typing import Any

from troupellm.kernels.quantized_linear import Fp8, Int8Channel, Int8WeightOnly, Outline, Weight
from troupellm.kernels.quantized_linear.mx import BLOCK, Element
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, KV_CACHE, STATIC_INPUTS, QuantizedCheckpoint
from troupellm.models.quantization.fp8 import TYPES, fp8_outline, whole_scale
from troupellm.models.quantization.layer_patterns import Names
from troupellm.models.quantization.mx import mx_outline, mx_weight
from troupellm.models.quantization.options import only, texts
from troupellm.protocol.errors import ModelLoadError

ELEMENTS: dict[str, Element] = {"fp4": "fp4_e2m1", "fp6_e2m3": "fp6_e2m3", "fp6_e3m2": "fp6_e3m2"}
_READ = frozenset(
    {
        "quant_method", "export", "global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude",
        "quant_mode", "algo_config", "version", "kv_cache_quant_config", "kv_cache_post_rope",
        "kv_cache_group", "min_kv_scale", "log_severity_level",
    }
)  # fmt: skip
_WEIGHT = frozenset(
    {
        "dtype", "qscheme", "ch_axis", "group_size", "symmetric", "is_dynamic", "observer_cls", "round_method",
        "scale_type", "scale_format", "scale_calculation_mode", "mx_element_dtype", "zero_point_type", "is_scale_quant",
        "qat_spec",
    }
)  # fmt: skip
"""Keys of weights. Unread ones describe how the stored numbers were found."""
_AT_RUN_TIME = ("online_rotation_layers", "online_r1_rotation", "online_had", "r3", "r4")
"""Settings of algorithms that turn inputs."""
_LINEAR_TYPES = ("Linear", "nn.Linear", "<class 'torch.nn.modules.linear.Linear'>")


class Quark:
    """A `QuantizationFormat`."""

    method = "quark"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        only(reader, _READ)
        reader.section("export").choice("weight_format", ("real_quantized",), "real_quantized")
        algorithms = reader.values.get("algo_config") or ()
        for algorithm in algorithms if isinstance(algorithms, list | tuple) else [algorithms]:
            if not isinstance(algorithm, dict) or any(algorithm.get(key) for key in _AT_RUN_TIME):
                raise reader.refuse("algo_config", "must be without rotations at run time")
        cached = {
            *texts(reader.section("export"), "kv_cache_group"), *texts(reader, "kv_cache_group"),
            *reader.section("kv_cache_quant_config").values,
        }  # fmt: skip
        self._kv_cache = bool(cached)
        in_cache = Names(sorted(cached), "quantization_config.kv_cache_group", wildcards=True)
        self._excluded = Names(texts(reader, "exclude"), "quantization_config.exclude", wildcards=True)
        self._default = Layer(reader.section("global_quant_config"))
        layers, types = reader.section("layer_quant_config"), reader.section("layer_type_quant_config")
        self._layers = [
            (
                Names([name], "quantization_config.layer_quant_config", wildcards=True),
                Layer(layers.section(name), cached=name in cached or name in in_cache),
            )
            for name in layers.values
        ]
        for name in types.values:
            if name not in _LINEAR_TYPES:
                raise types.refuse(name, "is not supported; layers may be of the type Linear")
            self._default = Layer(types.section(name))

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        if name in self._excluded:
            return stored.plain(name, shape)
        return self._layer(name).read(stored, name, shape)

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        return None if name in self._excluded else self._layer(name).outline(stored, name)

    def _layer(self, name: str) -> "Layer":
        return next((layer for names, layer in self._layers if name in names), self._default)

    def notes(self) -> tuple[str, ...]:
        static = self._default.static_inputs or any(layer.static_inputs for _, layer in self._layers)
        return tuple(f"quark: {note}" for holds, note in ((static, STATIC_INPUTS), (self._kv_cache, KV_CACHE)) if holds)


class Layer:
    """One section's settings for the layers that it applies to."""

    def __init__(self, reader: ConfigReader, *, cached: bool = False) -> None:
        """
        Args:
            cached: outputs go into the KV cache, whose type the server's settings choose.

        Raises:
            ModelLoadError: weights, inputs or outputs of a kind that is not supported.
        """
        only(reader, {"weight", "input_tensors", "output_tensors", "bias", "target_device"})
        if reader.values.get("output_tensors") and not cached:
            raise reader.refuse("output_tensors", "must be null but for layers of kv_cache_group")
        if isinstance(reader.values.get("weight"), list):
            raise reader.refuse("weight", "must be one scheme: weights quantized twice are not supported")
        if reader.has("bias"):
            raise reader.refuse("bias", "must be null")
        weight, inputs = reader.section("weight"), _first(reader.values.get("input_tensors"))
        only(weight, _WEIGHT)
        if weight.flag("is_scale_quant", False):
            raise weight.refuse("is_scale_quant", "must be false")
        self.dtype = weight.choice("dtype", ("fp8_e4m3", "int8", *ELEMENTS)) if weight.values else None
        self.static_inputs = bool(inputs) and not inputs.get("is_dynamic")
        self._eight_bit_inputs = inputs.get("dtype") == self.dtype
        if self.dtype is None:
            return
        if self.dtype in ELEMENTS:
            weight.choice("qscheme", ("per_group",))
            weight.choice("scale_format", ("e8m0",))
            if weight.integer("group_size") != BLOCK:
                raise weight.refuse("group_size", f"must be {BLOCK}")
            return
        scheme = weight.choice("qscheme", ("per_tensor", "per_channel"))
        if scheme == "per_channel" and weight.integer("ch_axis", 0, least=-2) not in (0, -2):
            raise weight.refuse("ch_axis", "must be 0")
        if not weight.flag("symmetric", True):
            raise weight.refuse("symmetric", "must be true")

    def read(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        """The weight of a layer, and all that is stored with it."""
        if self.dtype is None:
            return stored.plain(name, shape)
        for key in ("input_scale", "input_zero_point"):
            stored.ignore(f"{name}.{key}")
        if self.dtype in ELEMENTS:
            return mx_weight(stored, name, shape, ELEMENTS[self.dtype])
        values = stored.raw(f"{name}.weight", shape, *(("I8",) if self.dtype == "int8" else TYPES))
        scale = whole_scale(stored, name, shape[0])
        zero = f"{name}.weight_zero_point"
        if stored.has(zero):
            rows = ((shape[0], 1), (shape[0],), (1,), ())
            if stored.scalar_or(zero, rows, ("I8", "U8", "I32", *FLOATS)).any():
                raise ModelLoadError(f"{zero} is not zero, though weights are symmetric")
        if self.dtype == "fp8_e4m3":
            eight = self._eight_bit_inputs
            return stored.build(name, lambda: Fp8(values, scale, eight_bit_inputs=eight, dtype=stored.dtype))
        scale = scale.reshape(-1).expand(shape[0])
        if self._eight_bit_inputs:
            return stored.build(name, lambda: Int8Channel(values, scale, dtype=stored.dtype))
        return stored.build(name, lambda: Int8WeightOnly(values, scale[:, None], dtype=stored.dtype))

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        """As `QuantizationFormat.outline`."""
        if self.dtype is None or stored.type_of(f"{name}.weight") in (None, *FLOATS):
            return None
        if self.dtype in ELEMENTS:
            return mx_outline(stored, name, ELEMENTS[self.dtype])
        if self.dtype == "fp8_e4m3":
            return fp8_outline(stored, name, None, eight_bit_inputs=self._eight_bit_inputs)
        rows, columns = stored.sides(f"{name}.weight")
        return Outline("int8", rows, columns, columns, eight_bit_inputs=self._eight_bit_inputs)


def _first(inputs: Any) -> dict[str, Any]:
    """The scheme of inputs; of several one after the other, the first."""
    if isinstance(inputs, list):
        inputs = inputs[0] if inputs else None
    return inputs if isinstance(inputs, dict) else {}
