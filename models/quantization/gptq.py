"""GPTQ checkpoints (AutoGPTQ, GPTQModel): whole numbers of 4 or 8 bits, packed along the inputs.

    w[o, i] = scales[g_idx[i], o] * (q[i, o] - zeros[g_idx[i], o])

`checkpoint_format` "gptq" stores zeros one too low, "gptq_v2" as they are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import Int4Group, Int8WeightOnly, Outline, QuantizedWeight, Weight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, QuantizedCheckpoint
from troupellm.models.quantization.layer_patterns import safe_pattern
from troupellm.models.quantization.options import AUTOROUND_MAKING, MAKING, NUMBERS, check_numbers, ignored_note, only
from troupellm.models.quantization.unpack import WORD, unpack_rows, unpack_words
from troupellm.protocol.errors import ModelLoadError

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
    """A `Format`. Layers without `qweight` are stored plainly."""

    method = "gptq"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._notes = ignored_note(reader, only(reader, _READ, _HARMLESS))
        key = "checkpoint_format" if reader.has("checkpoint_format") else "format"
        self._stored_minus = 0 if reader.choice(key, ("gptq", "gptq_v2"), "gptq") == "gptq_v2" else 1
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
        bits, size, _ = self._settings_of(name)
        rows, columns = shape
        per_word, size = WORD // bits, columns if size == -1 else size
        if rows % per_word or columns % per_word:
            raise ModelLoadError(f"{name}: {list(shape)} does not fit words of {per_word} weights")
        groups = -(-columns // size)
        values = unpack_rows(stored.raw(f"{name}.qweight", (columns // per_word, rows), "I32"), bits)
        zeros = unpack_words(stored.raw(f"{name}.qzeros", (groups, rows // per_word), "I32"), bits)
        scales = stored.raw(f"{name}.scales", (groups, rows), *FLOATS).t()
        zero: Tensor | None = zeros.t().to(torch.int16) + self._stored_minus
        middle = 1 << (bits - 1)
        if zero is not None and bool((zero == middle).all()):
            zero = None
        group = self._groups(stored, name, columns, size)

        def make() -> QuantizedWeight:
            if bits == 4:
                return Int4Group.from_values(values, scales, zero=zero, group=group, dtype=stored.dtype)
            codes = (values.to(torch.int16) - middle).to(torch.int8)
            return Int8WeightOnly(
                codes, scales, zero=None if zero is None else zero - middle, group=group, dtype=stored.dtype
            )

        return stored.build(name, make)

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        if not stored.has(f"{name}.qweight"):
            return None
        bits, size, ordered = self._settings_of(name)
        words, rows = stored.sides(f"{name}.qweight")
        columns = words * WORD // bits
        size = columns if size == -1 else size
        ordered = ordered or columns % max(1, size) > 0
        return Outline("int4" if bits == 4 else "int8", rows, columns, size, offsets=True, ordered=ordered)

    def notes(self) -> tuple[str, ...]:
        return self._notes

    def _settings_of(self, name: str) -> Settings:
        for pattern, skip, text in self._rules:
            if pattern.match(name):
                if skip:
                    raise ModelLoadError(f"{name}: qweight is there, though `dynamic` says that it is not quantized")
                return self._changes[text]
        return self._settings

    def _groups(self, stored: QuantizedCheckpoint, name: str, columns: int, size: int) -> Tensor | None:
        """The group of each input; None if groups are runs of inputs."""
        runs = torch.arange(columns, dtype=torch.int32) // size
        key = f"{name}.g_idx"
        index = stored.raw(key, (columns,), "I32", "I64").to(torch.int32) if stored.has(key) else runs
        return None if columns % size == 0 and torch.equal(index, runs) else index


def _settings(reader: ConfigReader) -> Settings:
    bits, size = reader.integer("bits"), reader.integer("group_size", 128, least=-1)
    if bits not in (4, 8):
        raise reader.refuse("bits", "must be 4 or 8")
    if size == 0:
        raise reader.refuse("group_size", "must be -1 or at least 1")
    reader.flag("sym", True)
    return Settings(bits, size, reader.flag("desc_act", False))
