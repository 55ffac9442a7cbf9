"""Checkpoints of the compressed-tensors library (llm-compressor): groups of layers, each with a scheme for its weights.

    w = (q - zero_point) * scale

Where a kernel has inputs in eight bits of the weight's own type, the schemes' input settings select it. Everywhere else
inputs keep their type, which is closer to the unquantized model.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import Fp8, Int8Channel, Int8WeightOnly, Outline, Weight
from troupellm.kernels.quantized_linear.mx import Element
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, KV_CACHE, STATIC_INPUTS, QuantizedCheckpoint
from troupellm.models.quantization.fp8 import TYPES, fp8_outline, whole_scale
from troupellm.models.quantization.layer_patterns import Names
from troupellm.models.quantization.mx import mx_outline, mx_weight
from troupellm.models.quantization.nvfp4 import COMPRESSED, GROUP, nvfp4_outline, nvfp4_weight
from troupellm.models.quantization.options import only, pair, texts
from troupellm.models.quantization.unpack import WIDTHS, WORD, unpack_padded, unpack_words, words_for
from troupellm.models.quantization.whole_numbers import whole_code, whole_weight
from troupellm.protocol.errors import ModelLoadError

FORMATS = (
    "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized",
    "mxfp6-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
NVFP4 = FORMATS[-1]
PLAINLY_STORED = ("int-quantized", "float-quantized", "naive-quantized")
"""Each number in a byte of its own."""
_EVERY_LINEAR = "Linear"
_READ = frozenset(
    {
        "quant_method", "config_groups", "format", "ignore", "quantization_status", "global_compression_ratio",
        "kv_cache_scheme", "sparsity_config", "version",
    }
)  # fmt: skip
_ARGUMENTS = frozenset(
    {
        "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder", "observer",
        "observer_kwargs", "scale_dtype", "zp_dtype",
    }
)  # fmt: skip


class SmallFloat(NamedTuple):
    """A format of floats in blocks."""

    bits: int
    group: int


SMALL_FLOATS = {
    "mxfp4-pack-quantized": SmallFloat(4, 32), "mxfp6-pack-quantized": SmallFloat(6, 32),
    "mxfp8-quantized": SmallFloat(8, 32), NVFP4: SmallFloat(4, GROUP),
}  # fmt: skip


class Scheme(NamedTuple):
    """The form in which the weights of some layers are stored."""

    form: str
    bits: int
    floating: bool
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    eight_bit_inputs: bool
    """Inputs are to be in eight bits of the weight's own type."""
    static_inputs: bool
    """Inputs have a calibrated scale, which may be beside scales found at run time."""

    @property
    def key(self) -> str:
        """Name of the tensor of codes."""
        packed = self.form in ("pack-quantized", NVFP4) or (self.form.startswith("mx") and self.bits < 8)
        return "weight_packed" if packed else "weight"

    @property
    def whole_inputs(self) -> bool:
        """True if both sides are whole numbers of eight bits, with one scale per output."""
        return self.eight_bit_inputs and self.symmetric and self.strategy != "group"

    def groups(self, name: str, shape: tuple[int, int]) -> int:
        """Scales of an output.

        Raises:
            ModelLoadError: they do not divide the inputs of that layer.
        """
        if self.strategy != "group":
            return 1
        if shape[1] % self.group_size:
            raise ModelLoadError(f"{name}: {list(shape)} does not fit groups of {self.group_size} inputs")
        return shape[1] // self.group_size


class CompressedTensors:
    """A `QuantizationFormat`."""

    method = "compressed-tensors"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        only(reader, _READ)
        self._kv_cache = bool(reader.section("kv_cache_scheme").values)
        sparsity = reader.section("sparsity_config")
        if sparsity.values.get("format", "dense") != "dense":
            raise sparsity.refuse("format", "must be dense")
        reader.choice("quantization_status", ("compressed", "frozen"), "compressed")
        self._ignored = Names(texts(reader, "ignore"), "quantization_config.ignore")
        self._schemes: list[tuple[tuple[str, ...], Scheme]] = []
        groups = reader.section("config_groups")
        for name in groups.values:
            group = groups.section(name)
            only(group, {"targets", "weights", "input_activations", "output_activations", "format"})
            targets = texts(group, "targets")
            unknown = next((target for target in targets if not _is_target(target)), None)
            if unknown is not None:
                raise group.refuse("targets", f"may name {_EVERY_LINEAR}, layers and `re:` patterns")
            self._schemes.append((targets, _scheme(reader, group)))
        if not self._schemes:
            raise reader.refuse("config_groups", "must have a group")
        self._targets = [
            (
                Names((target for target in targets if target != _EVERY_LINEAR), "quantization_config.config_groups"),
                scheme,
            )
            for targets, scheme in self._schemes
        ]

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        scheme = self._scheme_of(stored, name)
        if scheme is None:
            return stored.plain(name, shape)
        if scheme.form == "pack-quantized":
            return _packed(stored, name, shape, scheme)
        if scheme.form.startswith("mx"):
            return mx_weight(stored, name, shape, ELEMENTS[scheme.bits], scheme.key)
        if scheme.form == NVFP4:
            stored.ignore(f"{name}.input_global_scale")
            return nvfp4_weight(stored, name, shape, COMPRESSED)
        return _fp8(stored, name, shape, scheme) if scheme.floating else _int8(stored, name, shape, scheme)

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        scheme = self._scheme_of(stored, name)
        if scheme is None or not stored.has(f"{name}.{scheme.key}"):
            return None
        rows, columns = stored.sides(f"{name}.{scheme.key}")
        if scheme.form.startswith("mx"):
            return mx_outline(stored, name, ELEMENTS[scheme.bits], scheme.key)
        if scheme.form == NVFP4:
            return nvfp4_outline(stored, name, COMPRESSED)
        if scheme.floating:
            return fp8_outline(stored, name, scheme.block, eight_bit_inputs=scheme.eight_bit_inputs)
        zeros = not scheme.symmetric
        if scheme.form != "pack-quantized":
            eight, size = scheme.whole_inputs, scheme.group_size or columns
            return Outline("int8", rows, columns, size, offsets=zeros, eight_bit_inputs=eight)
        groups = max(1, stored.sides(f"{name}.weight_scale")[1])
        columns = scheme.group_size * groups or columns * WORD // scheme.bits
        ordered = stored.has(f"{name}.weight_g_idx")
        return Outline(whole_code(scheme.bits), rows, columns, -(-columns // groups), offsets=zeros, ordered=ordered)

    def notes(self) -> tuple[str, ...]:
        found: list[str] = []
        if any(scheme.static_inputs for _, scheme in self._schemes):
            found.append(f"compressed-tensors: {STATIC_INPUTS}")
        if self._kv_cache:
            found.append(f"compressed-tensors: {KV_CACHE}")
        return tuple(found)

    def _scheme_of(self, stored: QuantizedCheckpoint, name: str) -> Scheme | None:
        """By the layer's name, else by a pattern, else as any linear layer: the library's own order. None where it
        lies plainly."""
        if name in self._ignored or _lies_plainly(stored, name):
            return None
        for names, scheme in self._targets:
            if names.exactly(name):
                return scheme
        for names, scheme in self._targets:
            if name in names:
                return scheme
        return next((scheme for targets, scheme in self._schemes if _EVERY_LINEAR in targets), None)


def _lies_plainly(stored: QuantizedCheckpoint, name: str) -> bool:
    """A float without a scale, which `ignore` names by the module's name where the file's name is another one."""
    return stored.type_of(f"{name}.weight") in FLOATS and not stored.has(f"{name}.weight_scale")


def _is_target(target: str) -> bool:
    return target in (_EVERY_LINEAR, "lm_head") or target.startswith("re:") or "." in target


def _scheme(reader: ConfigReader, group: ConfigReader) -> Scheme:
    home = group if group.has("format") else reader
    form = home.choice("format", FORMATS)
    if group.section("output_activations").values:
        raise group.refuse("output_activations", "must be null")
    weights, inputs = group.section("weights"), group.section("input_activations")
    only(weights, _ARGUMENTS)
    only(inputs, _ARGUMENTS)
    bits, own_type = weights.integer("num_bits", 8), weights.choice("type", ("int", "float"), "int")
    floating = own_type == "float"
    default = "group" if weights.has("group_size") else "tensor"
    strategies = ("tensor_group",) if form == NVFP4 else ("tensor", "channel", "group", "block")
    strategy = weights.choice("strategy", strategies, default)
    if weights.values.get("dynamic"):
        raise weights.refuse("dynamic", "must be false for weights")
    if bits not in _widths(form, floating=floating):
        raise weights.refuse("num_bits", f"and type must fit the format {form}")
    size = weights.integer("group_size") if strategy.endswith("group") else 0
    wanted = SMALL_FLOATS[form].group if form in SMALL_FLOATS else size
    if size != wanted:
        raise weights.refuse("group_size", f"must be {wanted}")
    if form in PLAINLY_STORED and (strategy == "group" if floating else strategy == "block"):
        raise weights.refuse("strategy", "must be tensor or channel, or block for floats, or group for whole numbers")
    if form not in PLAINLY_STORED and strategy == "block":
        raise weights.refuse("strategy", "must be tensor, channel or group")
    return Scheme(
        form=form,
        bits=bits,
        floating=floating,
        symmetric=weights.flag("symmetric", True),
        strategy=strategy,
        group_size=size,
        block=pair(weights, "block_structure") if strategy == "block" else None,
        eight_bit_inputs=inputs.values.get("num_bits") == 8 and inputs.values.get("type", "int") == own_type,
        static_inputs=bool(inputs.values) and inputs.values.get("dynamic", False) in (False, "local"),
    )


def _widths(form: str, *, floating: bool) -> tuple[int, ...]:
    """Bits of a number that a format may have."""
    if form in SMALL_FLOATS:
        return (SMALL_FLOATS[form].bits,) if floating else ()
    if floating:
        return (8,) if form in PLAINLY_STORED else ()
    return WIDTHS if form in ("pack-quantized", "naive-quantized", "int-quantized") else (8,)


def _int8(stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], scheme: Scheme) -> Weight:
    """Whole numbers, each in a byte of its own."""
    values, groups = stored.raw(f"{name}.weight", shape, "I8"), scheme.groups(name, shape)
    shapes = ((shape[0], groups), *(((shape[0],), (1,), ()) if groups == 1 else ()))
    scale = stored.scalar_or(f"{name}.weight_scale", shapes).float().reshape(-1, groups).expand(shape[0], groups)
    zero: Tensor | None = None
    if not scheme.symmetric:
        found = stored.scalar_or(f"{name}.weight_zero_point", shapes, ("I8", "I32", *FLOATS))
        zero = found.float().reshape(-1, groups).expand(shape[0], groups)
    _drop_input_scales(stored, name, scheme)
    if scheme.whole_inputs:
        return stored.build(name, lambda: Int8Channel(values, scale, dtype=stored.dtype))
    return stored.build(name, lambda: Int8WeightOnly(values, scale, zero=zero, dtype=stored.dtype))


def _fp8(stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], scheme: Scheme) -> Weight:
    values = stored.raw(f"{name}.weight", shape, *TYPES)
    if scheme.block is None:
        scale = whole_scale(stored, name, shape[0])
    else:
        wanted = (-(-shape[0] // scheme.block[0]), -(-shape[1] // scheme.block[1]))
        scale = stored.raw(f"{name}.weight_scale", wanted, *FLOATS).float()
    _drop_input_scales(stored, name, scheme)
    eight = scheme.eight_bit_inputs
    return stored.build(
        name, lambda: Fp8(values, scale, block=scheme.block, eight_bit_inputs=eight, dtype=stored.dtype)
    )


def _packed(stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], scheme: Scheme) -> Weight:
    """Whole numbers of 2 to 8 bits, packed along the inputs with an offset that makes them positive."""
    rows, columns = shape
    said = stored.raw(f"{name}.weight_shape", (2,), "I64", "I32").tolist()
    if said != [rows, columns]:
        raise ModelLoadError(f"{name}.weight_shape is {said}, expected {[rows, columns]}")
    groups = scheme.groups(name, shape)
    values = _unpacked(stored, f"{name}.weight_packed", shape, scheme.bits)
    if scheme.strategy == "tensor":
        scale = whole_scale(stored, name, rows).reshape(-1, 1).expand(rows, 1)
    else:
        scale = stored.raw(f"{name}.weight_scale", (rows, groups), *FLOATS)
    zero: Tensor | None = None
    if not scheme.symmetric:
        zero = _unpacked(stored, f"{name}.weight_zero_point", (rows, groups), scheme.bits, along=0)
    index, key = None, f"{name}.weight_g_idx"
    if stored.has(key):
        index = stored.raw(key, (columns,), "I32", "I64")
        runs = torch.arange(columns, dtype=index.dtype) // (columns // groups)
        index = None if torch.equal(index, runs) else index
    _drop_input_scales(stored, name, scheme)
    return stored.build(
        name, lambda: whole_weight(values, scale, scheme.bits, zero=zero, group=index, dtype=stored.dtype)
    )


def _unpacked(stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], bits: int, along: int = 1) -> Tensor:
    """uint8 of that shape, packed along one of its sides: without gaps, or as whole numbers in each word, which older
    versions of the library write. The number of words shows which it is.

    Raises:
        ModelLoadError: no such tensor, or of another size; or too short to show it.
    """
    dense, padded = words_for(shape[along], bits), -(-shape[along] // (WORD // bits))
    if dense == padded and WORD % bits and shape[along] > WORD // bits:
        raise ModelLoadError(f"{name}: {shape[along]} numbers of {bits} bits may lie in {dense} words in two ways")
    is_dense = dense == padded or stored.sides(name)[along] != padded
    words = dense if is_dense else padded
    found = stored.raw(name, (shape[0], words) if along else (words, shape[1]), "I32")
    unpack = unpack_words if is_dense else unpack_padded
    numbers = unpack(found if along else found.t(), bits)[:, : shape[along]]
    return numbers if along else numbers.t()


ELEMENTS: dict[int, Element] = {4: "fp4_e2m1", 6: "fp6_e2m3", 8: "fp8_e4m3"}
"""Element types by their bits."""


def _drop_input_scales(stored: QuantizedCheckpoint, name: str, scheme: Scheme) -> None:
    if scheme.static_inputs and not stored.has(f"{name}.input_scale"):
        raise ModelLoadError(f"{name}.input_scale is missing, though inputs are quantized with it")
    stored.ignore(f"{name}.input_scale")
    stored.ignore(f"{name}.input_zero_point")
