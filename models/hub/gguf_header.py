"""The header of a GGUF file, read strictly: counts, lengths and offsets are checked against the file before use.

The format is ggml's (docs/gguf.md there), versions 2 and 3, little-endian. Nothing is mapped into memory: a file that
shrinks while it is read is an error, not a signal.
"""

import re
import struct
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from troupellm.models.hub.model_folder import check_file
from troupellm.protocol.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_ENTRIES = 65_536
"""Most entries of metadata, and most tensors."""
MOST_NAME_BYTES = 65_535
MOST_TEXT_BYTES = 4 * 2**20
MOST_ITEMS = 2**21
"""Texts and flags in all arrays together: one takes several times as much memory as it takes in the file."""
MOST_HEADER_BYTES = 2**27
"""A vocabulary of 262,144 tokens takes some 2**23."""
MOST_DIMENSIONS = 4
MOST_ALIGNMENT = 2**20
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_COUNT, _KIND = struct.Struct("<Q"), struct.Struct("<I")
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Name, weights of a block and its bytes, of every type that is read, by its number in the file (ggml.h)."""
REFUSED = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
    40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
"""Names of types that are not read."""
QUANTIZATION_VERSION = 2
"""Version of the blocks' layouts; version 1 had other ones."""
_NAMES = ", ".join(name for name, _, _ in TYPES.values())
_NEWER = "look for another file of the model, made on a usual computer by a recent llama.cpp"
_HINT = f"look for a file of the model such as Q8_0 or Q4_K_M; types read: {_NAMES}"


class StoredTensor(NamedTuple):
    """The type, shape and place of a tensor."""

    type: str
    shape: tuple[int, ...]
    """Rows first, as torch has it; the file lists the fastest dimension first."""
    file: Path
    offset: int
    nbytes: int


class Header(NamedTuple):
    """A model's metadata and tensors; of a split model, those of all parts together."""

    name: str
    """The file's name, for messages."""
    metadata: dict[str, Any]
    """Numbers, booleans, texts; arrays of numbers as `array`, of others as lists."""
    tensors: dict[str, StoredTensor]


def is_gguf(path: Path) -> bool:
    """True if this is a file in GGUF format and not a folder."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def read_header(path: Path) -> Header:
    """Read one file, or all parts of a model that is split over several.

    Raises:
        ModelLoadError: not such a file, damaged, cut off, or with tensors of a type that is not supported.
    """
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    parts = [_part(part, number, count) for number, part in enumerate(_parts(path, count))]
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelLoadError(f"{part.name}: tensor {name} is in {tensors[name].file.name} too")
            tensors[name] = tensor
    wanted = parts[0].metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ModelLoadError(f"{path.name}: split.tensors.count is {wanted}, but the parts hold {len(tensors)} tensors")
    return Header(parts[0].name, parts[0].metadata, tensors)


def _parts(path: Path, count: int) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelLoadError(f"{path.name}: one of {count} parts must be called NAME-00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}{path.suffix}") for number in range(1, count + 1)]
    missing = next((part.name for part in paths if not part.is_file()), None)
    if missing is not None:
        raise ModelLoadError(f"{missing} is missing; it is one of {count} parts of this model")
    return paths


def _part(path: Path, number: int, count: int) -> Header:
    """One of `count` parts, numbered from 0; the name may be that of another part, so its metadata decide."""
    part = _read(path)
    for key, expected in (("split.count", count), ("split.no", number)):
        found = part.metadata.get(key, expected)
        if found != expected:
            raise ModelLoadError(
                f"{path.name}: {key} is {found!r:.80}, expected {expected}",
                hint="each part keeps the name it was made with",
            )
    return part


def _read(path: Path) -> Header:
    check_file(path)
    try:
        with path.open("rb") as file:
            return _Cursor(path, file).header()
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error.strerror}") from error


class _Cursor:
    """A position in the file that never goes beyond its end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size, self._at, self._items = path.stat().st_size, 0, 0

    def header(self) -> Header:
        if self._size < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise self._refuse("is no GGUF file")
        version = self._number(_KIND)
        if version not in VERSIONS:
            if int.from_bytes(_KIND.pack(version), "big") in VERSIONS:
                raise self._refuse("has big-endian numbers; little-endian ones are read", hint=_NEWER)
            raise self._refuse(f"has version {version}; versions 2 and 3 are read", hint=_NEWER)
        num_tensors, num_entries = self._number(_COUNT), self._number(_COUNT)
        for what, number in (("tensors", num_tensors), ("metadata entries", num_entries)):
            if number > MOST_ENTRIES:
                raise self._refuse(f"claims {number} {what}; at most {MOST_ENTRIES} are read")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text(MOST_NAME_BYTES, "a key")
            if key in metadata:
                raise self._refuse(f"has {key!r:.80} twice")
            metadata[key] = self._value(key, self._number(_KIND))
        version = metadata.get("general.quantization_version", QUANTIZATION_VERSION)
        if version != QUANTIZATION_VERSION:
            raise self._refuse(
                f"general.quantization_version is {version!r:.80}; {QUANTIZATION_VERSION} is read",
                hint="look for a newer file of the model: llama.cpp has written version 2 since May 2023",
            )
        listed = [self._tensor() for _ in range(num_tensors)]
        return Header(self._path.name, metadata, self._placed(listed, metadata))

    def _placed(self, listed: list[tuple[str, StoredTensor]], metadata: dict[str, Any]) -> dict[str, StoredTensor]:
        """The tensors with their places in the file: the data begins behind the header, at the next aligned byte."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MOST_ALIGNMENT or alignment % 8:
            raise self._refuse(
                f"general.alignment must be a multiple of 8 up to {MOST_ALIGNMENT}, got {alignment!r:.80}"
            )
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, tensor in listed:
            if name in tensors:
                raise self._refuse(f"has tensor {name} twice")
            if tensor.offset % alignment:
                raise self._refuse(f"tensor {name} begins at {tensor.offset}, which is not aligned to {alignment}")
            if begin + tensor.offset + tensor.nbytes > self._size:
                raise self._refuse(f"tensor {name} ends beyond the file; was it downloaded whole?")
            tensors[name] = tensor._replace(offset=begin + tensor.offset)
        self._check_apart(tensors)
        return tensors

    def _check_apart(self, tensors: dict[str, StoredTensor]) -> None:
        """Few bytes must not stand for many tensors, each of which takes memory of its own."""
        placed = sorted(tensors.items(), key=lambda item: item[1].offset)
        for (name, tensor), (following, other) in pairwise(placed):
            if tensor.offset + tensor.nbytes > other.offset:
                raise self._refuse(f"tensors {name:.80} and {following:.80} overlap")

    def _tensor(self) -> tuple[str, StoredTensor]:
        name = self._text(MOST_NAME_BYTES, "a tensor's name")
        num_dimensions = self._number(_KIND)
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise self._refuse(
                f"tensor {name:.80} has {num_dimensions} dimensions; 1 to {MOST_DIMENSIONS} are possible"
            )
        dimensions = [self._number(_COUNT) for _ in range(num_dimensions)]
        kind, offset = self._number(_KIND), self._number(_COUNT)
        if kind not in TYPES:
            label = f"{REFUSED[kind]} ({kind})" if kind in REFUSED else f"{kind}, which has no name here"
            raise self._refuse(f"tensor {name:.80} has type {label}; it is not read", hint=_HINT)
        label, weights, size = TYPES[kind]
        total = 1
        for dimension in dimensions:
            total *= dimension  # whole numbers of any size: nothing overflows
        if total == 0 or dimensions[0] % weights:
            raise self._refuse(f"tensor {name:.80} has shape {dimensions[::-1]}; {label} takes rows of {weights}")
        return name, StoredTensor(label, tuple(dimensions[::-1]), self._path, offset, total // weights * size)

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(struct.Struct("<" + _NUMBERS[kind]))
        if kind == _BOOL:
            return self._flag(key, self._take(1)[0])
        if kind == _TEXT:
            return self._text(MOST_TEXT_BYTES, key)
        if kind == _ARRAY:
            return self._array(key)
        raise self._refuse(f"{key!r:.80} has the unknown type {kind}")

    def _array(self, key: str) -> Any:
        kind, count = self._number(_KIND), self._number(_COUNT)
        if kind in _NUMBERS:
            numbers = array(_NUMBERS[kind])
            numbers.frombytes(self._take(count * numbers.itemsize))
            return numbers
        if kind not in (_BOOL, _TEXT):
            raise self._refuse(f"{key!r:.80} is an array of type {kind}, which is not supported")
        self._items += count
        if self._items > MOST_ITEMS:
            raise self._refuse(f"has more than {MOST_ITEMS} texts and flags in its arrays")
        if kind == _BOOL:
            return [self._flag(key, byte) for byte in self._take(count)]
        return [self._text(MOST_NAME_BYTES, key) for _ in range(count)]

    def _flag(self, key: str, byte: int) -> bool:
        if byte > 1:
            raise self._refuse(f"{key!r:.80} must be true or false, got the byte {byte}")
        return byte == 1

    def _number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self._take(layout.size))[0]

    def _text(self, most: int, what: str) -> str:
        length = self._number(_COUNT)
        if length > most:
            raise self._refuse(f"{what!r:.80} is {length} bytes long; at most {most} are read")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._refuse(f"{what!r:.80} is not UTF-8") from None

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise self._refuse("ends within its header")
        if count > MOST_HEADER_BYTES - self._at:
            raise self._refuse(f"has a header of more than {MOST_HEADER_BYTES} bytes")
        data = self._file.read(count)
        if len(data) != count:
            raise self._refuse("ends within its header")
        self._at += count
        return data

    def _refuse(self, text: str, hint: str = "") -> ModelLoadError:
        return ModelLoadError(f"{self._path.name}: {text}", hint=hint)
