"""Checkpoints of the compressed-tensors library (llm-compressor): groups of layers, each with a scheme for its weights.

    w = (q - zero_point) * scale

Where a kernel has inputs in eight bits of the weight's own type, the schemes' input settings select it. Everywhere else
inputs keep their type, which is closer to the unquantized model.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import Fp8, Int4Group, Int8Channel, Int8WeightOnly, Outline, Weight
from troupellm.kernels.quantized_linear.mx import Element
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, KV_CACHE, STATIC_INPUTS, QuantizedCheckpoint
from troupellm.models.quantization.fp8 import TYPES, fp8_outline, whole_scale
from troupellm.models.quantization.layer_patterns import Names
from troupellm.models.quantization.mx import mx_outline, mx_weight
from troupellm.models.quantization.options import only, pair, texts
from troupellm.models.quantization.unpack import WORD, unpack_words
from troupellm.protocol.errors import ModelLoadError

FORMATS = (
    "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized",
    "mxfp6-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
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

    @property
    def key(self) -> str:
        """Name of the tensor of codes."""
        packed = self.form == "pack-quantized" or (self.form.startswith("mx") and self.bits < 8)
        return "weight_packed" if packed else "weight"


class CompressedTensors:
    """A `Format`."""

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
        return _fp8(stored, name, shape, scheme) if scheme.floating else _int8(stored, name, shape, scheme)

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        scheme = self._scheme_of(stored, name)
        if scheme is None or not stored.has(f"{name}.{scheme.key}"):
            return None
        rows, columns = stored.sides(f"{name}.{scheme.key}")
        if scheme.form.startswith("mx"):
            return mx_outline(stored, name, ELEMENTS[scheme.bits], scheme.key)
        if scheme.floating:
            return fp8_outline(stored, name, scheme.block, eight_bit_inputs=scheme.eight_bit_inputs)
        zeros = not scheme.symmetric
        if scheme.form != "pack-quantized":
            eight = scheme.eight_bit_inputs and not zeros
            return Outline("int8", rows, columns, columns, offsets=zeros, eight_bit_inputs=eight)
        columns = columns * WORD // scheme.bits
        size = -(-columns // max(1, stored.sides(f"{name}.weight_scale")[1]))
        ordered = stored.has(f"{name}.weight_g_idx")
        return Outline("int4" if scheme.bits == 4 else "int8", rows, columns, size, offsets=zeros, ordered=ordered)

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
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), default)
    if weights.values.get("dynamic"):
        raise weights.refuse("dynamic", "must be false for weights")
    allowed = {"pack-quantized": (4, 8), "mxfp4-pack-quantized": (4,), "mxfp6-pack-quantized": (6,)}.get(form, (8,))
    if bits not in allowed or (form == "pack-quantized" and floating) or (form.startswith("mx") and not floating):
        raise weights.refuse("num_bits", f"and type must fit the format {form}")
    size = weights.integer("group_size") if strategy == "group" else 0
    if form.startswith("mx") and size != 32:
        raise weights.refuse("group_size", "must be 32")
    if form in ("int-quantized", "float-quantized", "naive-quantized"):
        if strategy == "group" or (strategy == "block") > floating:
            raise weights.refuse("strategy", "must be tensor or channel, or block for floats")
    elif strategy == "block":
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
        static_inputs=bool(inputs.values) and inputs.values.get("dynamic", False) is False,
    )


def _int8(stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], scheme: Scheme) -> Weight:
    values = stored.raw(f"{name}.weight", shape, "I8")
    scale = whole_scale(stored, name, shape[0]).reshape(-1).expand(shape[0])
    zero = None
    if not scheme.symmetric:
        zero = stored.scalar_or(
            f"{name}.weight_zero_point", ((shape[0], 1), (shape[0],), (1,), ()), ("I8", "I32", *FLOATS)
        )
    _drop_input_scales(stored, name, scheme)
    if scheme.eight_bit_inputs and zero is None:
        return stored.build(name, lambda: Int8Channel(values, scale, dtype=stored.dtype))
    zeros = None if zero is None else zero.float().reshape(-1, 1).expand(shape[0], 1)
    return stored.build(name, lambda: Int8WeightOnly(values, scale[:, None], zero=zeros, dtype=stored.dtype))


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
    """Whole numbers of 4 or 8 bits, packed along the inputs with an offset that makes them positive."""
    rows, columns = shape
    said = stored.raw(f"{name}.weight_shape", (2,), "I64", "I32").tolist()
    if said != [rows, columns]:
        raise ModelLoadError(f"{name}.weight_shape is {said}, expected {[rows, columns]}")
    size = {"group": scheme.group_size, "channel": columns, "tensor": columns}[scheme.strategy]
    if columns % size:
        raise ModelLoadError(f"{name}: {list(shape)} does not fit groups of {size} inputs")
    groups, words = columns // size, -(-columns * scheme.bits // WORD)
    values = unpack_words(stored.raw(f"{name}.weight_packed", (rows, words), "I32"), scheme.bits)[:, :columns]
    if scheme.strategy == "tensor":
        scale = whole_scale(stored, name, rows).reshape(-1, 1).expand(rows, 1)
    else:
        scale = stored.raw(f"{name}.weight_scale", (rows, groups), *FLOATS)
    zero: Tensor | None = None
    if not scheme.symmetric:
        packed = stored.raw(f"{name}.weight_zero_point", (-(-rows * scheme.bits // WORD), groups), "I32")
        zero = unpack_words(packed.t(), scheme.bits).t()[:rows]
    index, key = None, f"{name}.weight_g_idx"
    if stored.has(key):
        index = stored.raw(key, (columns,), "I32", "I64")
        index = None if torch.equal(index, torch.arange(columns, dtype=index.dtype) // size) else index
    _drop_input_scales(stored, name, scheme)
    if scheme.bits == 4:
        return stored.build(
            name, lambda: Int4Group.from_values(values, scale, zero=zero, group=index, dtype=stored.dtype)
        )
    codes = (values.to(torch.int16) - 128).to(torch.int8)
    zeros = None if zero is None else zero.to(torch.int16) - 128
    return stored.build(name, lambda: Int8WeightOnly(codes, scale, zero=zeros, group=index, dtype=stored.dtype))


ELEMENTS: dict[int, Element] = {4: "fp4_e2m1", 6: "fp6_e2m3", 8: "fp8_e4m3"}
"""Element types by their bits."""


def _drop_input_scales(stored: QuantizedCheckpoint, name: str, scheme: Scheme) -> None:
    if scheme.static_inputs and not stored.has(f"{name}.input_scale"):
        raise ModelLoadError(f"{name}.input_scale is missing, though inputs are quantized with it")
    stored.ignore(f"{name}.input_scale")
    stored.ignore(f"{name}.input_zero_point")
