"""Checkpoints of bitsandbytes: nf4 and fp4 in blocks over the whole weight, or eight bits by output.

    4 bits: w = quant_map[code] * absmax of its block, a block being so many neighbours of the flattened weight
    8 bits: w = code * SCB / 127 of its output

`absmax` may be in eight bits itself: nested_quant_map[code] * nested_absmax of its block + an offset.
"""

from math import gcd
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from torch import Tensor

from troupellm.kernels.quantized_linear import Int8WeightOnly, Outline, Table4, Weight
from troupellm.kernels.quantized_linear.table4 import PLACES
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.options import ignored_note, only
from troupellm.protocol.errors import ModelLoadError

TYPES = ("nf4", "fp4")
LARGEST = 127.0
MOST_STATE = 4096
"""Bytes of the state in JSON; a usual one has less than 200."""
_READ = frozenset(
    {
        "quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_storage",
        "llm_int8_has_fp16_weight",
    }
)  # fmt: skip
_HARMLESS = frozenset(
    {
        "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_skip_modules",
        "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload",
    }
)  # fmt: skip
"""The type of codes and the second quantization show in each layer's tensors, and inputs keep their type."""
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class State(Struct, forbid_unknown_fields=True):
    """A weight's `quant_state` as it is stored."""

    blocksize: Size
    shape: tuple[Size, Size]
    quant_type: str = ""
    dtype: str = ""
    nested_blocksize: Size | None = None
    nested_dtype: str = ""
    nested_offset: float = 0.0


class BitsAndBytes:
    """A `QuantizationFormat`. The tensors beside a layer's weight show if the layer is quantized."""

    method = "bitsandbytes"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._notes = ignored_note(reader, only(reader, _READ, _HARMLESS))
        for key in ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"):
            reader.flag(key, False)
        reader.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
        if reader.flag("llm_int8_has_fp16_weight", False):
            raise reader.refuse("llm_int8_has_fp16_weight", "must be false")

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        if (kind := _four_bits(stored, name)) is not None:
            return _table4(stored, name, shape, kind)
        if not stored.has(f"{name}.SCB"):
            return stored.plain(name, shape)
        layout = f"{name}.weight_format"
        if stored.has(layout) and bool(stored.scalar_or(layout, ((), (1,)), ("U8",)).any()):
            raise ModelLoadError(f"{layout} must be 0: codes in rows")
        codes, scale = stored.raw(f"{name}.weight", shape, "I8"), stored.raw(f"{name}.SCB", shape[:1], "F32")
        return stored.build(name, lambda: Int8WeightOnly(codes, scale[:, None] / LARGEST, dtype=stored.dtype))

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        if (kind := _four_bits(stored, name)) is not None:
            state = _state(stored, name, kind)
            rows, columns = state.shape
            return Outline("float4", rows, columns, gcd(columns, state.blocksize))
        if not stored.has(f"{name}.SCB"):
            return None
        rows, columns = stored.sides(f"{name}.weight")
        return Outline("int8", rows, columns, columns)

    def notes(self) -> tuple[str, ...]:
        return self._notes


def _four_bits(stored: QuantizedCheckpoint, name: str) -> str | None:
    """The type of a layer's codes of four bits; None where it has others."""
    return next((kind for kind in TYPES if stored.has(_state_name(name, kind))), None)


def _state_name(name: str, kind: str) -> str:
    return f"{name}.weight.quant_state.bitsandbytes__{kind}"


def _state(stored: QuantizedCheckpoint, name: str, kind: str) -> State:
    """
    Raises:
        ModelLoadError: the state is damaged.
    """
    key = _state_name(name, kind)
    shape = stored.shape_of(key) or ()
    if len(shape) != 1 or shape[0] > MOST_STATE:
        raise ModelLoadError(f"{key} has shape {list(shape)}, expected at most {MOST_STATE} bytes in a row")
    try:
        return msgspec.json.decode(bytes(stored.peek(key, shape, "U8").tolist()), type=State)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{key} cannot be read: {error}") from error


def _table4(stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], kind: str) -> Weight:
    """Blocks may go on in the next row. What blocks and rows have as a common divisor lies in one block, and is a run.

    Raises:
        ModelLoadError: tensors are missing, or do not fit the layer or each other.
    """
    state, (rows, columns) = _state(stored, name, kind), shape
    if state.shape != shape or columns % 2:
        raise ModelLoadError(
            f"{_state_name(name, kind)} has shape {list(state.shape)}, expected {list(shape)}, of even inputs"
        )
    stored.ignore(_state_name(name, kind))
    half = rows * columns // 2
    pairs = stored.scalar_or(f"{name}.weight", ((half, 1), (1, half)), ("U8",)).view(rows, columns // 2)
    table = stored.raw(f"{name}.weight.quant_map", (PLACES,), "F32")
    run = gcd(columns, state.blocksize)
    scale = _absmax(stored, name, -(-2 * half // state.blocksize), state).repeat_interleave(state.blocksize // run)
    scale = scale[: 2 * half // run].view(rows, -1)
    return stored.build(name, lambda: Table4(pairs << 4 | pairs >> 4, table, scale, dtype=stored.dtype))


def _absmax(stored: QuantizedCheckpoint, name: str, blocks: int, state: State) -> Tensor:
    """float32 [blocks]."""
    key, nested = f"{name}.weight.absmax", state.nested_blocksize
    if nested is None:
        return stored.raw(key, (blocks,), "F32")
    codes = stored.raw(key, (blocks,), "U8")
    values = stored.raw(f"{name}.weight.nested_quant_map", (256,), "F32")
    largest = stored.raw(f"{name}.weight.nested_absmax", (-(-blocks // nested),), "F32")
    return values[codes.int()] * largest.repeat_interleave(nested)[:blocks] + state.nested_offset
