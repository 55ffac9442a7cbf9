"""The parts of a GGUF file beside its vocabulary: tokens around a prompt, ends of an answer, chat templates."""

import json
from array import array
from pathlib import Path
from typing import Any

import gguf
import pytest

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.config.gguf_special_tokens import end_ids, special_id, tokenizer_config
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.gguf_header import Header
from troupellm.models.tokenizer.gguf_pre_tokenizers import pre_tokenizer
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.gguf.gguf_vocabulary import stored, write_vocabulary

VOCABULARIES = stored()["vocabularies"]


def around(path: Path, vocabulary: str, **settings: Any) -> list[str]:
    """The tokens of a prompt with one letter."""
    written = VOCABULARIES[vocabulary]
    ids = Tokenizer.load(write_vocabulary(path / "a.gguf", written, **settings)).encode("a", add_special_tokens=True)
    return [written["tokens"][index] for index in ids]


@pytest.mark.parametrize(
    ("vocabulary", "settings", "expected"),
    [
        ("pieces", {}, ["<s>", "\u2581a"]),
        ("pieces", {"add_bos_token": False}, ["\u2581a"]),
        ("pieces", {"add_eos_token": True}, ["<s>", "\u2581a", "</s>"]),
        ("pieces", {"add_space_prefix": False}, ["<s>", "a"]),
        ("gemma4", {"add_bos_token": True}, ["a"]),
        ("bytes", {"pre": "llama-bpe"}, ["<s>", "a"]),
        ("bytes", {"pre": "llama-bpe", "add_bos_token": False}, ["a"]),
        ("bytes", {"pre": "qwen2"}, ["a"]),
        ("bytes", {"pre": "dbrx", "add_bos_token": True}, ["<s>", "a"]),
        ("words", {}, ["[CLS]", "\u2581a", "[SEP]"]),
        ("unigram", {}, ["\u2581a", "</s>"]),
    ],
)
def test_tokens_around_a_prompt(tmp_path: Path, vocabulary: str, settings: dict[str, Any], expected: list[str]) -> None:
    assert around(tmp_path, vocabulary, **settings) == expected


def header(tokens: list[str], types: list[int] | None = None, **settings: Any) -> Header:
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": array("i", types or [3] * len(tokens))}
    return Header("a.gguf", values | {key.replace("__", "."): value for key, value in settings.items()}, {})


@pytest.mark.parametrize(
    ("tokens", "types", "expected"),
    [
        (["a", "<|im_end|>", "<|endoftext|>"], None, {1, 2}),
        (["<|end|>", "<|return|>", "<|call|>"], None, {1, 2}),  # gpt-oss: <|end|> closes a message
        (["<|end|>", "<|flush|>", "<|calls|>"], None, {1, 2}),
        (["<|end|>", "<|return|>", "a"], None, {0, 1}),
        (["<|end|>", "a", "b"], None, {0}),  # phi
        (["</s>", "<|tool_response>", "<turn|>"], None, {1, 2}),  # gemma4
        (["</s>", "a", "b"], None, {0}),
        (["</s>", "<|eot_id|>", "<EOT>"], [1, 1, 1], {1}),  # ordinary text, and a token marked wrongly
        (["</s>", "<EOT>", "b"], [4, 4, 1], {1}),  # gemma3: HTML
        (["</s>", "<EOT>", "b"], [3, 4, 1], {0, 1}),
    ],
)
def test_ends_of_an_answer(tokens: list[str], types: list[int] | None, expected: set[int]) -> None:
    assert set(end_ids(header(tokens, types))) == expected


def test_named_ends_count_with_any_text() -> None:
    named = {
        f"tokenizer__ggml__{key}": index for index, key in enumerate(("eos_token_id", "eot_token_id", "eom_token_id"))
    }
    assert end_ids(header(["x", "y", "z", "a"], [1, 1, 1, 1], **named)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("model", "expected"), [("llama", (1, 2, 0)), ("gpt2", (None, None, None)), ("t5", (None, 1, 2))]
)
def test_ids_that_the_file_does_not_name(model: str, expected: tuple[int | None, ...]) -> None:
    found = header(["a", "b", "c"], tokenizer__ggml__model=model)
    assert tuple(special_id(found, f"{key}_token_id") for key in ("bos", "eos", "unknown")) == expected


def test_an_id_beyond_the_vocabulary_is_no_usual_one() -> None:
    assert special_id(header(["a", "b"], tokenizer__ggml__model="llama"), "eos_token_id") is None


def test_templates_with_a_name_need_not_be_listed() -> None:
    found = header(["a"], tokenizer__chat_template="plain", tokenizer__chat_template__tool_use="tools")
    assert tokenizer_config(found)["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]


def test_a_named_template_is_there_to_be_chosen(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", VOCABULARIES["pieces"])
    reader = gguf.GGUFReader(str(path))
    writer = gguf.GGUFWriter(str(tmp_path / "b.gguf"), "llama")
    writer.add_chat_template([{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}])
    for field in reader.fields.values():
        if field.types and not field.name.startswith("GGUF.") and field.name != gguf.Keys.General.ARCHITECTURE:
            writer.add_key_value(
                field.name, field.contents(), field.types[0], field.types[1] if field.types[1:] else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert ChatTemplate.load(tmp_path / "b.gguf", None).sources == {"default": "one", "tool_use": "two"}


@pytest.mark.parametrize(
    ("architecture", "rule"), [("qwen2", "qwen2"), ("qwen3", "qwen2"), ("qwen3moe", "qwen2"), ("gpt-oss", "gpt-4o")]
)
@pytest.mark.parametrize("pre", ["default", None])
def test_a_file_without_a_rule_gets_that_of_its_architecture(architecture: str, rule: str, pre: str | None) -> None:
    values = {"general.architecture": architecture, "tokenizer.ggml.pre": pre}
    assert pre_tokenizer(ConfigReader(values)) == pre_tokenizer(ConfigReader({"tokenizer.ggml.pre": rule}))


def test_a_file_without_a_rule_is_refused_where_models_of_its_architecture_differ() -> None:
    with pytest.raises(
        ModelLoadError, match=r"a\.gguf: tokenizer\.ggml\.pre does not say .* architecture llama"
    ) as caught:
        pre_tokenizer(ConfigReader({"general.architecture": "llama"}, file="a.gguf"))
    assert "--tokenizer" in str(caught.value.hint)


def test_an_empty_token_and_one_that_is_unused_match_no_text(tmp_path: Path) -> None:
    tokens = VOCABULARIES["pieces"]["tokens"]
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path / "a.gguf", VOCABULARIES["pieces"]))
    empty, unused = tokens.index(""), tokens.index("[unused]")
    assert tokenizer.vocabulary()[f"[EMPTY_{empty}]"] == empty
    assert not {empty, unused} & {*tokenizer.encode(f"[unused] [EMPTY_{empty}]", add_special_tokens=True)}


def test_bos_is_never_there_twice(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path / "a.gguf", VOCABULARIES["pieces"]))
    once = tokenizer.encode("a b", add_special_tokens=True)
    assert tokenizer.encode("<s>a b", add_special_tokens=True) == once
    assert tokenizer.count("<s>a b", add_special_tokens=True) == len(once)
    assert tokenizer.encode("a<s>", add_special_tokens=True).count(1) == 2
    plain = Tokenizer.load(write_vocabulary(tmp_path / "b.gguf", VOCABULARIES["pieces"], add_bos_token=False))
    assert plain.encode("<s>a b", add_special_tokens=True) == once


def beside(path: Path, change: dict[str, Any]) -> Tokenizer:
    """A file without a rule for words, and its tokenizer.json beside it."""
    file = write_vocabulary(path / "a.gguf", VOCABULARIES["bytes"], pre="qwen2")
    definition = json.loads(Tokenizer.load(file).definition()) | change
    write_vocabulary(path / "a.gguf", VOCABULARIES["bytes"], pre="falcon")
    (path / "tokenizer.json").write_text(json.dumps(definition))
    return Tokenizer.load(file)


def test_a_published_tokenizer_beside_the_file_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="troupellm.models")
    text = "don't 12345 <think>"
    tokenizer = beside(tmp_path, {})
    assert "a.gguf: its tokenizer is the tokenizer.json beside it" in caplog.messages
    (tmp_path / "tokenizer.json").unlink()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids != Tokenizer.load(tmp_path / "a.gguf").encode(text, add_special_tokens=False)
    write_vocabulary(tmp_path / "a.gguf", VOCABULARIES["bytes"], pre="qwen2")
    assert ids == Tokenizer.load(tmp_path / "a.gguf").encode(text, add_special_tokens=False)


def test_a_tokenizer_of_another_model_beside_the_file_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = VOCABULARIES["bytes"]["tokens"]
    model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(reversed(tokens[:300]))}, "merges": []}
    tokenizer = beside(tmp_path, {"model": model, "added_tokens": []})
    assert "a.gguf: the tokenizer.json beside it is that of another model: " in caplog.text
    assert tokenizer.vocabulary()[tokens[5]] == 5
