"""adapter_model.safetensors of PEFT: its header, which is checked before anything large is read, and the digest."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupellm.models.adapters.settings import MERGE, AdapterSettings, read_settings
from troupellm.models.checkpoint.safetensors_header import check_header
from troupellm.models.hub.errors import plain_name, why
from troupellm.models.hub.model_folder import check_file
from troupellm.protocol.errors import AdapterError, ModelLoadError

FILE = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
"""Types of numbers that an adapter may have, and their bytes."""
FIRST_MATRIX, SECOND_MATRIX, BIAS = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias"
MAGNITUDE = ".lora_magnitude_vector"
"""Of DoRA: the lengths of the adapted weight's rows."""
FIRST_VECTORS, SECOND_VECTORS = ".lora_embedding_A", ".lora_embedding_B"
"""The two matrices of an embedding's adapter."""
COPY, WHOLE = ".base_layer.weight", ".weight"
"""The base model's weight beside its adapter; and a weight that takes the place of the base model's."""
RANKED = (FIRST_MATRIX, FIRST_VECTORS)
"""Kinds whose first size is the rank, but for stacked experts."""
_PREFIX = "base_model.model."
_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class AdapterHeader:
    """An adapter's size, as its header says it."""

    rank: int
    """The largest one of a module."""
    num_bytes: int
    """Of all tensors, as they are stored."""
    base_model_name: str
    """As the adapter names it; perhaps empty."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the file."""

    name: str
    module: str
    """Name within the base model."""
    kind: str
    """The rest of the name: one of the kinds above."""
    shape: tuple[int, ...]
    num_bytes: int


def adapter_header(folder: Path) -> AdapterHeader:
    """Read settings and header; no weights.

    Raises:
        AdapterError: a file is missing or damaged, or holds what is not served.
    """
    settings, stored = read_settings(folder), read_entries(folder)
    return AdapterHeader(
        rank=max((settings.rank_of(entry.module) for entry in stored if entry.kind in RANKED), default=0),
        num_bytes=sum(entry.num_bytes for entry in stored),
        base_model_name=settings.base_model_name,
    )


def adapter_digest(folder: Path) -> str:
    """SHA-256, in hexadecimal digits, of the weights and of the settings that count. Reads the whole file.

    Raises:
        AdapterError: a file is missing or damaged, or the settings ask for what is not served.
    """
    settings, digest = read_settings(folder), hashlib.sha256()
    _look_at(folder)
    try:
        with (folder / FILE).open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise AdapterError(f"{FILE} cannot be read: {why(error)}") from error
    return _with_settings(digest.digest(), settings)


def digest_of(content: bytes, settings: AdapterSettings) -> str:
    """As `adapter_digest`, of a file that was read."""
    return _with_settings(hashlib.sha256(content).digest(), settings)


def _with_settings(weights: bytes, settings: AdapterSettings) -> str:
    return hashlib.sha256(weights + settings.canonical()).hexdigest()


def read_content(folder: Path) -> bytes:
    """The whole file, in one read: it cannot change while tensors are made from it.

    Raises:
        AdapterError: it cannot be read.
    """
    try:
        return (folder / FILE).read_bytes()
    except OSError as error:
        raise AdapterError(f"{FILE} cannot be read: {why(error)}") from error


def read_entries(folder: Path) -> list[Stored]:
    """The tensors that the header names.

    Raises:
        AdapterError: the file is missing or damaged, or holds tensors that no adapter has.
    """
    _look_at(folder)
    try:
        header = check_header(folder / FILE)
    except ModelLoadError as error:
        raise AdapterError(error.message, hint=error.hint) from error
    if not isinstance(header, dict):
        raise AdapterError(f"{FILE}: the header is no object", hint="save the adapter again")
    return [_stored(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _look_at(folder: Path) -> None:
    """Check that the file is a regular one inside the folder."""
    path = folder / FILE
    try:
        check_file(path)
    except ModelLoadError as error:
        raise AdapterError(error.message, hint=error.hint) from error
    if not path.is_file():
        if (folder / PICKLED).exists():
            hint = "save the adapter again with safe_serialization=True"
            raise AdapterError(f"{PICKLED} is pickled and is not read", hint=hint)
        raise AdapterError(f"{FILE} is missing", hint="name a folder that PEFT's save_pretrained() wrote")


def _stored(name: str, entry: Any) -> Stored:
    shown = plain_name(name)
    try:
        kind, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise AdapterError(f"{FILE}: the header does not describe {shown}", hint="save the adapter again") from None
    if kind not in DTYPES:
        known = ", ".join(sorted(DTYPES))
        raise AdapterError(f"{FILE}: tensor {shown} has type {plain_name(kind)}, expected one of {known}")
    size = DTYPES[kind]
    for width in shape:
        if type(width) is not int or width < 0:
            raise AdapterError(f"{FILE}: tensor {shown} has no valid shape", hint="save the adapter again")
        size *= width
    if type(begin) is not int or type(end) is not int or end - begin != size:
        raise AdapterError(f"{FILE}: tensor {shown} has other bytes than its shape says", hint="save the adapter again")
    return _placed(name, shown, shape, size)


def _placed(name: str, shown: str, shape: tuple[int, ...], size: int) -> Stored:
    """Split a name into module and kind."""
    if not name.startswith(_PREFIX):
        raise AdapterError(f"{FILE}: tensor {shown} does not begin with {_PREFIX}, as PEFT's names do")
    rest = name.removeprefix(_PREFIX)
    for kind in (FIRST_MATRIX, SECOND_MATRIX, BIAS, MAGNITUDE, FIRST_VECTORS, SECOND_VECTORS, COPY):
        if rest.endswith(kind):
            return Stored(name, rest.removesuffix(kind), kind, shape, size)
    if rest.endswith(MAGNITUDE + WHOLE):
        return Stored(name, rest.removesuffix(MAGNITUDE + WHOLE), MAGNITUDE, shape, size)
    if "lora_" in rest:
        raise AdapterError(f"{FILE}: tensor {shown} is not known", hint=MERGE)
    if rest.endswith(WHOLE):
        return Stored(name, rest.removesuffix(WHOLE), WHOLE, shape, size)
    raise AdapterError(f"{FILE}: tensor {shown} is a whole one (modules_to_save), which is not served", hint=MERGE)
