"""Files that cannot be served: `troupellm serve` exits with code 3, and one line names the file and its value."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import transformers

from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.gguf.gguf_llama import SIZES, Kind, Written

EXIT_MODEL = 3


def tiny(folder: Path, **options: object) -> Path:
    config = transformers.LlamaConfig(**SIZES | {"intermediate_size": 256})
    return Written(folder / "tiny.gguf", config, {"": Kind.Q8_0}, **options).path


def with_bytes(offset: int, data: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = tiny(folder)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)
        return path

    return write


def of_type_41(folder: Path) -> Path:
    path = tiny(folder)
    field = next(tensor.field for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.attn_q.weight")
    offset = field.offset + sum(part.nbytes for part in field.parts[:-2])
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<I", 41))
    return path


def cut(folder: Path) -> Path:
    path = tiny(folder)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def without_its_second_part(folder: Path) -> Path:
    path = tiny(folder, extra={"split.count": 2, "split.no": 0})
    return path.rename(folder / "tiny-00001-of-00002.gguf")


def bare(architecture: str, **values: str) -> Callable[[Path], Path]:
    """A file of that architecture without tensors."""

    def write(folder: Path) -> Path:
        writer = gguf.GGUFWriter(str(folder / "bare.gguf"), architecture)
        for key, value in values.items():
            writer.add_string(f"general.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "bare.gguf"

    return write


def adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "acme/m"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def adapter_with_config(folder: Path) -> Path:
    (write_tiny_model(folder) / "model.safetensors").rename(folder / "adapter_model.safetensors")
    return adapter(folder)


def cut_safetensors(folder: Path) -> Path:
    os.truncate(write_tiny_model(folder) / "model.safetensors", 10_000)
    return folder


def without_a_shard(folder: Path) -> Path:
    (write_tiny_model(folder) / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    return folder


def only_pickles(folder: Path) -> Path:
    path = write_tiny_model(folder / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    return path


def with_a_token_behind_the_embedding(folder: Path) -> Path:
    path = write_tiny_model(folder / "model")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"][0] | {"id": 99_999, "content": "<|far|>"}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], added]}))
    return path


ROWS = [
    pytest.param(cut, ("tiny.gguf",), id="cut"),
    pytest.param(without_its_second_part, ("tiny-00002-of-00002.gguf",), id="part missing"),
    pytest.param(bare("clip", type="mmproj"), ("bare.gguf", "mmproj"), id="mmproj as model"),
    pytest.param(with_bytes(4, struct.pack(">I", 3)), ("tiny.gguf", "big-endian"), id="big-endian"),
    pytest.param(with_bytes(4, struct.pack("<I", 1)), ("tiny.gguf", "version 1"), id="version 1"),
    pytest.param(of_type_41, ("blk.0.attn_q.weight", "41"), id="type 41"),
    pytest.param(lambda folder: tiny(folder, extra={"llama.attention.mystery": 7}), ("mystery", "7"), id="key"),
    pytest.param(lambda folder: tiny(folder, pre="unheard-of"), ("unheard-of",), id="pre"),
    pytest.param(bare("rwkv7"), ("bare.gguf", "rwkv7"), id="architecture"),
    pytest.param(adapter, ("LoRA", "acme/m"), id="adapter folder"),
    pytest.param(adapter_with_config, ("LoRA", "acme/m"), id="adapter with a config"),
    pytest.param(cut_safetensors, ("model.safetensors", "10,000"), id="cut safetensors"),
    pytest.param(without_a_shard, ("model-00002-of-00002.safetensors",), id="shard missing"),
    pytest.param(only_pickles, ("pytorch_model.bin",), id="only pickles"),
    pytest.param(with_a_token_behind_the_embedding, ("<|far|>", "99"), id="token behind the embedding"),
]


def refused(*arguments: str) -> list[str]:
    """The lines of the refusal, of a fresh process."""
    command = [sys.executable, "-m", "troupellm.server.cli.main", "serve", *arguments, "--port", "0"]
    done = subprocess.run(
        [*command, "--no-spare-worker"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=100
    )
    assert done.returncode == EXIT_MODEL, done.stderr
    lines = done.stderr.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("troupellm: "))
    return lines[start:]


@pytest.mark.slow
@pytest.mark.parametrize(("write", "said"), ROWS)
def test_a_file_that_cannot_be_served_is_named_in_one_line(
    tmp_path: Path, write: Callable[[Path], Path], said: tuple[str, ...]
) -> None:
    told, *hint = refused(str(write(tmp_path)))
    assert [line.partition(" ")[0] for line in hint] in ([], ["hint:"])
    assert all(part in told for part in said), (told, hint)


def test_a_revision_is_given_once() -> None:
    told, *_ = refused("acme/tiny@one", "--revision", "two")
    assert "one" in told
    assert "two" in told
