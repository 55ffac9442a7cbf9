"""AWQ checkpoints (AutoAWQ): whole numbers of 4 bits, packed along the outputs in the order of its gemm kernel.

w[o, i] = scales[i / group, o] * (q[i, o] - zeros[i / group, o])
"""

from troupellm.kernels.quantized_linear import Int4Group, Outline, Weight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, QuantizedCheckpoint
from troupellm.models.quantization.options import (
    AUTOROUND_MAKING,
    MAKING,
    NUMBERS,
    check_numbers,
    ignored_note,
    only,
    texts,
)
from troupellm.models.quantization.unpack import unpack_awq
from troupellm.protocol.errors import ModelLoadError

_READ = frozenset(
    {
        "quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format",
        "modules_to_not_convert", "checkpoint_format", "pack_dtype", "lm_head", *NUMBERS,
    }
)  # fmt: skip
_HARMLESS = frozenset(
    {
        *MAKING,
        *AUTOROUND_MAKING,
        "ignore",
        "do_fuse",
        "modules_to_fuse",
        "fuse_max_seq_len",
        "exllama_config",
        "sym",
        "desc_act",
    }
)


class Awq:
    """A `QuantizationFormat`.

    Layers without `qweight` are stored plainly; `modules_to_not_convert` names those, or parts of their
    names, which others may have, too."""

    method = "awq"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._notes = ignored_note(reader, only(reader, _READ, _HARMLESS))
        reader.choice("pack_dtype", ("int32",), "int32")
        check_numbers(reader)
        bits = "w_bit" if reader.has("w_bit") else "bits"
        if reader.integer(bits, 4) != 4:
            raise reader.refuse(bits, "must be 4")
        key = "q_group_size" if reader.has("q_group_size") else "group_size"
        self._size = reader.integer(key, 128, least=-1)
        if self._size == 0:
            raise reader.refuse(key, "must be -1 or at least 1")
        self._has_zeros = reader.flag("zero_point", True)
        for key in ("version", "format", "checkpoint_format"):
            if reader.has(key):
                reader.choice(key, ("gemm", "GEMM"))
        texts(reader, "modules_to_not_convert")

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        if not stored.has(f"{name}.qweight"):
            return stored.plain(name, shape)
        rows, columns = shape
        size = columns if self._size == -1 else self._size
        if rows % 8 or columns % size:
            raise ModelLoadError(f"{name}: {list(shape)} does not fit words of 8 rows and groups of {size} inputs")
        groups = columns // size
        values = unpack_awq(stored.raw(f"{name}.qweight", (columns, rows // 8), "I32")).t()
        scales = stored.raw(f"{name}.scales", (groups, rows), *FLOATS).t()
        zero = None
        if self._has_zeros:
            zero = unpack_awq(stored.raw(f"{name}.qzeros", (groups, rows // 8), "I32")).t()
        else:
            stored.ignore(f"{name}.qzeros")
        return stored.build(name, lambda: Int4Group.from_values(values, scales, zero=zero, dtype=stored.dtype))

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        if not stored.has(f"{name}.qweight"):
            return None
        columns, words = stored.sides(f"{name}.qweight")
        groups, _ = stored.sides(f"{name}.scales")
        return Outline("int4", 8 * words, columns, -(-columns // max(1, groups)), offsets=self._has_zeros)

    def notes(self) -> tuple[str, ...]:
        return self._notes
