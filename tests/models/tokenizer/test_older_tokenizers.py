"""Tokenizer files older than tokenizer.json: SentencePiece's, tiktoken's and Mistral's. The ids of awkward texts are
those of sentencepiece, tiktoken or transformers, as `tests/reality/make_reference_tokenizers.py` wrote them down."""

import base64
import codecs
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import text_models
from awkward_texts import TEXTS
from older_tokenizers import STORED, ranks, write

from troupellm.models.tokenizer.sentencepiece_model import read_model
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import ModelLoadError

CASES = json.loads(STORED.read_text())
BY_SENTENCEPIECE = "<s>a</s>"
"""A text that sentencepiece alone does not find special tokens in; transformers and llama.cpp do."""
CHUNKS = CASES["LlamaTokenizer"]["files"]["tokenizer.model"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ids_are_those_of_the_reference(tmp_path: Path, case: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, case["files"]))
    special = case["reference"] == "transformers"
    for text, ids in zip(TEXTS, case["ids"], strict=True):
        if case["reference"] != "sentencepiece" or text != BY_SENTENCEPIECE:
            assert tokenizer.encode(text, add_special_tokens=special) == ids, text


def test_a_tekken_file_alone_names_its_ends_and_starts_with_bos(tmp_path: Path) -> None:
    files = CASES["tekken"]["files"]
    tokenizer = Tokenizer.load(write(tmp_path, {"tekken.json": files["tekken.json"]}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.encode("a<|start|>", add_special_tokens=True) == [1, ranks()[b"a"] + 10, 3]


def test_a_tekken_file_that_lists_no_special_tokens_has_those_of_its_time(tmp_path: Path) -> None:
    tekken = {key: value for key, value in CASES["tekken"]["files"]["tekken.json"].items() if key != "special_tokens"}
    tekken["config"] = {"pattern": r"\S+|\s+"}
    tokenizer = Tokenizer.load(write(tmp_path, {"tekken.json": tekken}))
    assert tokenizer.encode("[INST][TOOL_CONTENT]", add_special_tokens=False) == [3, 19]


def test_llama_3_names_its_special_tokens_by_rule(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, CASES["llama 3"]["files"]))
    first = len(ranks())
    assert tokenizer.encode("<|eot_id|><|reserved_special_token_250|>", add_special_tokens=False) == [
        first + 9,
        first + 255,
    ]
    assert tokenizer.eos_token_ids == {first + 1}


def test_ids_between_the_named_tokens_of_kimi_are_reserved(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, CASES["kimi"]["files"]))
    first = len(ranks())
    assert tokenizer.size == first + 256
    assert tokenizer.encode(f"<|reserved_token_{first + 1}|>", add_special_tokens=False) == [first + 1]


def lines(*entries: tuple[bytes, int]) -> str:
    return base64.b64encode(b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in entries)).decode()


def raw(data: bytes) -> str:
    return base64.b64encode(data).decode()


LLAMA = {"config.json": {"model_type": "llama"}}
WRONG = {
    "no pattern": ({"tokenizer.model": "ranks", "config.json": {"model_type": "x"}}, "does not say how text is cut"),
    "a gap": ({"tokenizer.model": lines((b"a", 0), (b"b", 2))} | LLAMA, "the ranks must be 0 to 1, each once"),
    "a long token": (
        {"tokenizer.model": lines((b"a" * 100_000, 0))} | LLAMA,
        "tokenizer.model: a token has 100000 bytes; tokens of at most 1024 are read",
    ),
    "no base64": ({"tokenizer.model": raw(b"?? 1\n")} | LLAMA, "line 1 is no token in base64 with a rank"),
    "a far token": (
        {"tokenizer.model": "ranks", "tokenizer_config.json": {"added_tokens_decoder": {"9999999": {"content": "x"}}}}
        | LLAMA,
        "added_tokens_decoder has the id 9999999, far beyond",
    ),
    "no JSON": ({"tekken.json": raw(b"{")}, "tekken.json cannot be read"),
    "no ranks": (
        {"tekken.json": {"config": {"pattern": "."}, "vocab": [{"rank": 1, "token_bytes": "YQ=="}]}},
        "vocab must have the ranks 0 to 0, in order",
    ),
    "special gaps": (
        {"tekken.json": {"config": {"pattern": "."}, "vocab": [], "special_tokens": [{"rank": 1, "token_str": "x"}]}},
        "special_tokens must have the ranks 0 to 0",
    ),
    "too many": (
        {"tekken.json": {"config": {"pattern": ".", "default_num_special_tokens": 10**9}, "vocab": "ranks"}},
        "default_num_special_tokens is 1000000000, but 20 are listed",
    ),
}


@pytest.mark.parametrize(("files", "message"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.load(write(tmp_path, files))


def test_a_cut_sentencepiece_model_is_refused_or_smaller() -> None:
    data = base64.b64decode(CHUNKS)
    refused = 0
    for length in range(1, len(data), 211):
        try:
            read_model(data[:length])  # a cut between two fields leaves a smaller model
        except ModelLoadError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "data",
    [
        b"\n\xff\xff\xff\xff\x7f",
        b"\n" + b"\xff" * 11,
        b"\n\x02\x0a\x09",
        b"\n\x00\n\x00",
        b"\n\x02\x18\x01\x12\x02\x18\x03",
    ],
)
def test_a_hostile_sentencepiece_model_is_refused(data: bytes) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
        read_model(data)


def test_a_table_that_makes_a_text_much_longer_is_refused() -> None:
    table = struct.pack("<I", 4) + bytes(4) + b"b" * 100 + b"\0"
    normalizer = b"\x12" + bytes([len(table)]) + table
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model: its table of characters puts 100 bytes in place"):
        read_model(b"\n\x03\n\x01a" + b"\x1a" + bytes([len(normalizer)]) + normalizer)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tekken.json", "qwen.tiktoken"])
def test_a_file_of_unusual_size_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 2**40)
    with pytest.raises(ModelLoadError, match=f"^{name} has 1,099,511,627,776 bytes; tokenizers of at most"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tekken.json", "qwen.tiktoken"])
def test_a_git_lfs_pointer_is_called_that(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(ModelLoadError, match=f"^{name} is a Git LFS pointer") as caught:
        Tokenizer.load(tmp_path)
    assert "git lfs pull" in str(caught.value.hint)


def test_a_byte_order_mark_before_a_definition_is_no_part_of_it(tmp_path: Path) -> None:
    path = text_models.byte_level(tmp_path) / "tokenizer.json"
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert Tokenizer.load(tmp_path).form == "byte_level"
