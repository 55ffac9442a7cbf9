"""GPTQ checkpoints (AutoGPTQ, GPTQModel): whole numbers of 2, 3, 4 or 8 bits, packed along the inputs without gaps.

    w[o, i] = scales[g_idx[i], o] * (q[i, o] - zeros[g_idx[i], o])

`checkpoint_format` "gptq" stores zeros one too low, "gptq_v2" as they are. GPTQModel subtracts ones word by word, so a
zero point of 0 borrows from its neighbour: they are added in the same way.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import Outline, Weight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, QuantizedCheckpoint
from troupellm.models.quantization.layer_patterns import safe_pattern
from troupellm.models.quantization.options import AUTOROUND_MAKING, MAKING, NUMBERS, check_numbers, ignored_note, only
from troupellm.models.quantization.unpack import WORD, unpack_rows, unpack_words
from troupellm.models.quantization.whole_numbers import whole_code, whole_weight
from troupellm.protocol.errors import ModelLoadError

WIDTHS = (2, 3, 4, 8)
"""Others lie in planes of bits in GPTQModel's files."""
_SKIP, _CHANGE = "-:", "+:"
_OWN = frozenset({"bits", "group_size", "sym", "desc_act"})
_HARMLESS = frozenset(
    {
        *MAKING, *AUTOROUND_MAKING, "use_cuda_fp16", "use_exllama", "exllama_config", "disable_exllama", "version",
        "hyb_act",
    }
)  # fmt: skip
_READ = frozenset({"quant_method", "checkpoint_format", "format", "lm_head", "dynamic", "pack_dtype", *NUMBERS, *_OWN})


class Settings(NamedTuple):
    """Settings of a quantized layer."""

    bits: int
    group_size: int
    ordered: bool
    """True if inputs may be in other groups than their neighbours."""


class Gptq:
    """A `QuantizationFormat`. Layers without `qweight` are stored plainly."""

    method = "gptq"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._notes = ignored_note(reader, only(reader, _READ, _HARMLESS))
        key = "checkpoint_format" if reader.has("checkpoint_format") else "format"
        self._minus_one = reader.choice(key, ("gptq", "gptq_v2"), "gptq") == "gptq"
        reader.choice("pack_dtype", ("int32",), "int32")
        check_numbers(reader)
        reader.flag("lm_head", False)
        self._settings = _settings(reader)
        dynamic = reader.section("dynamic")
        self._rules = [
            (safe_pattern(text.removeprefix(_SKIP).removeprefix(_CHANGE), "dynamic"), text.startswith(_SKIP), text)
            for text in dynamic.values
        ]
        self._changes = {
            text: _settings(ConfigReader({**reader.values, **dynamic.section(text).values}, f"dynamic.{text}."))
            for _, skip, text in self._rules
            if not skip
        }
        for text in self._changes:
            only(dynamic.section(text), _OWN)

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        if not stored.has(f"{name}.qweight"):
            return stored.plain(name, shape)
        return gptq_weight(stored, name, shape, self._settings_of(name), minus_one=self._minus_one)

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        if not stored.has(f"{name}.qweight"):
            return None
        return gptq_outline(stored, name, self._settings_of(name))

    def notes(self) -> tuple[str, ...]:
        return self._notes

    def _settings_of(self, name: str) -> Settings:
        for pattern, skip, text in self._rules:
            if pattern.match(name):
                if skip:
                    raise ModelLoadError(f"{name}: qweight is there, though `dynamic` says that it is not quantized")
                return self._changes[text]
        return self._settings


def gptq_weight(
    stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], settings: Settings, *, minus_one: bool
) -> Weight:
    """Read `qweight`, `qzeros`, `scales` and, where there is one, `g_idx` of a layer.

    Args:
        minus_one: zero points are stored one too low.

    Raises:
        ModelLoadError: they are missing, or do not fit the layer.
    """
    bits, (rows, columns) = settings.bits, shape
    size = columns if settings.group_size == -1 else settings.group_size
    if rows * bits % WORD or columns * bits % WORD:
        raise ModelLoadError(f"{name}: {list(shape)} numbers of {bits} bits are not whole words of {WORD} bits")
    groups = -(-columns // size)
    values = unpack_rows(stored.raw(f"{name}.qweight", (columns * bits // WORD, rows), "I32"), bits)
    zeros = stored.raw(f"{name}.qzeros", (groups, rows * bits // WORD), "I32")
    scales = stored.raw(f"{name}.scales", (groups, rows), *FLOATS).t()
    zero: Tensor | None = _zero_points(zeros, bits, minus_one=minus_one)
    if zero is not None and bool((zero == 1 << (bits - 1)).all()):
        zero = None
    group = _groups(stored, name, columns, size)
    return stored.build(name, lambda: whole_weight(values, scales, bits, zero=zero, group=group, dtype=stored.dtype))


def _zero_points(words: Tensor, bits: int, *, minus_one: bool) -> Tensor:
    """int32 [groups, words] to int16 [outputs, groups]."""
    if minus_one and WORD % bits == 0:
        words = words + sum(1 << place for place in range(0, WORD, bits))
        minus_one = False
    zeros = unpack_words(words, bits).t().to(torch.int16)
    return (zeros + 1) & ((1 << bits) - 1) if minus_one else zeros


def gptq_outline(stored: QuantizedCheckpoint, name: str, settings: Settings) -> Outline:
    """Outline of the weight that `gptq_weight` returns."""
    words, rows = stored.sides(f"{name}.qweight")
    columns = words * WORD // settings.bits
    size = columns if settings.group_size == -1 else settings.group_size
    ordered = settings.ordered or columns % max(1, size) > 0
    return Outline(whole_code(settings.bits), rows, columns, size, offsets=True, ordered=ordered)


def _groups(stored: QuantizedCheckpoint, name: str, columns: int, size: int) -> Tensor | None:
    """The group of each input; None if groups are runs of inputs."""
    runs = torch.arange(columns, dtype=torch.int32) // size
    key = f"{name}.g_idx"
    index = stored.raw(key, (columns,), "I32", "I64").to(torch.int32) if stored.has(key) else runs
    return None if columns % size == 0 and torch.equal(index, runs) else index


def _settings(reader: ConfigReader) -> Settings:
    bits, size = reader.integer("bits"), reader.integer("group_size", 128, least=-1)
    if bits not in WIDTHS:
        raise reader.refuse("bits", f"must be one of {', '.join(map(str, WIDTHS))}")
    if size == 0:
        raise reader.refuse("group_size", "must be -1 or at least 1")
    reader.flag("sym", True)
    return Settings(bits, size, reader.flag("desc_act", False))
