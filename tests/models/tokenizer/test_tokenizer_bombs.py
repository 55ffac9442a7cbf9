"""Rules of a stranger's tokenizer.json that would stop a server: they are refused before any text is encoded."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from troupellm.models.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.models.tokenizer.tokenizer_bombs import MOST_STEPS
from troupellm.models.tokenizer.tokenizer_probe import complaint
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints import text_models


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def in_turn(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(text: str) -> str:
    """A table of SentencePiece with one text and a trie of nothing."""
    return base64.b64encode(struct.pack("<I", 4) + bytes(4) + text.encode() + b"\0").decode()


DOUBLE = replace({"String": "a"}, "aa")
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "many steps": ({"normalizer": in_turn(*[DOUBLE] * (MOST_STEPS + 1))}, "has 33 steps; at most 32 are run"),
    "nested steps": ({"normalizer": in_turn(*[in_turn(DOUBLE, DOUBLE)] * 17)}, "has 34 steps; at most 32 are run"),
    "doubling": ({"normalizer": in_turn(*[replace({"Regex": "a"}, "aa")] * 8)}, "make .* characters of "),
    "fourfold": ({"normalizer": in_turn(*[replace({"String": "a"}, "aaaa")] * 8)}, "make .* characters of |too much"),
    "a text of two letters": (
        {"normalizer": in_turn(*[replace({"String": "q,"}, "q," * 9)] * 3)},
        "make .* characters of ",
    ),
    "steps within a step": (
        {"normalizer": replace({"String": "a"}, "b" * 100) | {"normalizers": [{"type": "NFC"}]}},
        "make .* characters of ",
    ),
    "a table of characters": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("b" * 100)}},
        "puts 100 bytes in place of one; at most 64 are read",
    ),
    "a long replacement of tokens": (
        {"decoder": replace({"String": "a"}, "b" * 100)},
        "make .* characters of ",
    ),
    "a long replacement": ({"normalizer": replace({"String": "a"}, "b" * 100)}, "make .* characters of "),
    "something from nothing": ({"normalizer": replace({"Regex": ""}, "b" * 100)}, "make .* characters of "),
    "a long beginning": ({"normalizer": {"type": "Prepend", "prepend": "b" * 100_000}}, "make .* characters of "),
    "memory": (
        {"normalizer": in_turn(*[replace({"Regex": "a"}, "a" * 100)] * 6)},
        "for short texts|cannot be run|make",
    ),
    "backtracking": ({"pre_tokenizer": split("(a+)+b|(a|aa)+c|(a*)*d")}, "take .* s for |cannot be run|too long"),
    "looking back and forth": ({"pre_tokenizer": split(r"(?:a+a+a+a+)+\d")}, "take .* s for |cannot be run|too long"),
}


@pytest.mark.parametrize(("rules", "message"), BOMBS.values(), ids=BOMBS)
def test_rules_that_blow_up_texts_are_refused(tmp_path: Path, rules: dict[str, Any], message: str) -> None:
    folder = text_models.byte_level(tmp_path)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | rules))
    with pytest.raises(ModelLoadError, match=rf"^tokenizer\.json: .*({message})"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "rules",
    [
        {"pre_tokenizer": split(r"[a-z]+|[A-Z]+|\s+|.")},
        {"normalizer": in_turn(*[{"type": "NFC"}] * MOST_STEPS)},
        {"normalizer": replace({"String": "<"}, "[less]")},
    ],
)
def test_unusual_rules_that_do_no_harm_are_taken(tmp_path: Path, rules: dict[str, Any]) -> None:
    folder = text_models.byte_level(tmp_path)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | rules))
    assert Tokenizer.load(folder).encode("the fox", add_special_tokens=False)


def test_the_trial_of_unusual_rules_runs_no_code_of_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    folder = text_models.byte_level(tmp_path)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": split("[a-z]+|.")}))
    (folder / "tokenizers.py").write_text("open('ran', 'w')\nTokenizer = None\n")
    monkeypatch.chdir(folder)
    assert Tokenizer.load(folder).encode("the fox", add_special_tokens=False)
    assert not (folder / "ran").exists()


def test_the_patterns_of_published_tokenizers_do_no_harm() -> None:
    for rule in {rule.patterns for rule in PRE_TOKENIZERS.values()}:
        assert complaint(json.dumps({"pre_tokenizer": in_turn_split(rule)})) is None


def in_turn_split(patterns: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [split(pattern) for pattern in patterns]}
