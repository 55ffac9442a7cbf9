"""Types of tensors that are read, and refusals of all others before any weight is read."""

import re
import struct
from pathlib import Path

import gguf
import pytest

from troupellm.kernels.quantized_linear.gguf import LAYOUTS
from troupellm.models.hub.gguf_header import REFUSED, TYPES, read_header
from troupellm.protocol.errors import ModelLoadError

FILE_TYPES = {
    "Q8_0": {"Q8_0", "F32"},
    "Q4_K_M": {"Q4_K", "Q6_K", "Q5_K", "Q5_0", "Q8_0", "F32"},
}
"""Names of files that a hint may recommend, and the types of tensors that llama.cpp puts into them."""
WORD = re.compile(r"\w+")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def one_tensor(path: Path, kind: int, *, version: int | None = 2) -> Path:
    """A file with one tensor of 256 weights, of a type with this number."""
    entries = [] if version is None else [text("general.quantization_version") + struct.pack("<II", 4, version)]
    tensor = text("blk.0.ffn_up.weight") + struct.pack("<IQIQ", 1, 256, kind, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries)) + b"".join(entries) + tensor + bytes(4096))
    return path


def test_types_have_the_numbers_and_sizes_of_the_package() -> None:
    for number, (name, weights, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (weights, size)
        assert name not in LAYOUTS or LAYOUTS[name][:2] == (weights, size)
    for kind in gguf.GGMLQuantizationType:
        assert int(kind) in TYPES or REFUSED[int(kind)] == kind.name


@pytest.mark.parametrize("number", TYPES)
def test_a_type_is_read(tmp_path: Path, number: int) -> None:
    stored = read_header(one_tensor(tmp_path / "one.gguf", number)).tensors["blk.0.ffn_up.weight"]
    assert (stored.type, stored.shape) == (TYPES[number][0], (256,))
    assert stored.nbytes == 256 // TYPES[number][1] * TYPES[number][2]


@pytest.mark.parametrize("number", sorted({*REFUSED, 43, 134, 2**32 - 1}))
def test_another_type_is_refused_and_the_hint_names_types_that_are_read(tmp_path: Path, number: int) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_header(one_tensor(tmp_path / "one.gguf", number))
    refused = REFUSED.get(number, str(number))
    message = f"one.gguf: tensor blk.0.ffn_up.weight has type {refused}"
    assert str(caught.value).startswith(message)
    assert str(number) in str(caught.value)
    recommended, listed = str(caught.value.hint).split("types read:")
    read = {name for name, _, _ in TYPES.values()}
    assert set(WORD.findall(listed)) == read
    assert set(WORD.findall(recommended)) & (set(FILE_TYPES) | read | set(REFUSED.values())) == set(FILE_TYPES)
    assert all(types <= read for types in FILE_TYPES.values())
    assert refused not in WORD.findall(str(caught.value.hint))


@pytest.mark.parametrize("version", [0, 1, 3])
def test_another_version_of_the_blocks_is_refused(tmp_path: Path, version: int) -> None:
    with pytest.raises(ModelLoadError, match=rf"(?m)^one.gguf: general.quantization_version is {version}; 2 is read$"):
        read_header(one_tensor(tmp_path / "one.gguf", 2, version=version))


def test_a_file_may_leave_the_version_out(tmp_path: Path) -> None:
    assert read_header(one_tensor(tmp_path / "one.gguf", 2, version=None)).tensors
