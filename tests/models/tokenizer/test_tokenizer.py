import json
import threading

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import decoders

from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints import text_models
from troupellm.tests.support.environment.without_package import run_without


def write_json(folder, name, value):
    (folder / name).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("write", "form"),
    [
        (text_models.byte_level, "byte_level"),
        (text_models.byte_fallback, "byte_fallback"),
        (text_models.word_piece, "other"),
    ],
)
def test_the_decoder_form_is_recognised(tmp_path, write, form):
    assert Tokenizer.load(write(tmp_path)).form == form


def test_bytes_of_byte_level_tokens_add_up_to_the_text(tmp_path):
    tokenizer = Tokenizer.load(text_models.byte_level(tmp_path))

    @settings(max_examples=60, deadline=None)
    @given(st.text())
    def check(text):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text

    check()


def test_bytes_of_fallback_tokens(tmp_path):
    tokenizer = Tokenizer.load(text_models.byte_fallback(tmp_path))
    token_ids = tokenizer.encode("the 🎉", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == " the 🎉".encode()
    assert len(tokenizer.byte_token_ids) == 256


def test_an_added_token_outside_the_byte_alphabet_stands_for_itself(tmp_path):
    tokenizer = Tokenizer.load(text_models.byte_level(tmp_path))
    (token_id,) = tokenizer.encode("<tool call>", add_special_tokens=False)
    assert tokenizer.token_bytes(token_id) == b"<tool call>"
    assert tokenizer.decode([token_id]) == "<tool call>"
    assert token_id not in tokenizer.special_token_ids


def test_a_panic_of_the_library_is_an_error_like_any_other(tmp_path):
    """The library's own exception would pass by every `except Exception`, and end the encoding task."""
    tokenizer = Tokenizer.load(text_models.panicking(tmp_path))
    tokenizer._backend.decoder = decoders.Strip("a", 5, 5)  # more than the token has
    for call in (
        lambda: tokenizer.encode("a", add_special_tokens=False),
        lambda: tokenizer.encode_pair("a", "a", most=None, side="right"),
        lambda: tokenizer.decode([0]),
        lambda: tokenizer.decode_stream(skip_special_tokens=True).step(0),
    ):
        with pytest.raises(RuntimeError, match="the library tokenizers panicked"):
            call()
    assert tokenizer.encode("", add_special_tokens=True) == []


def test_ids_beyond_the_vocabulary_are_nothing(tmp_path):
    tokenizer = Tokenizer.load(text_models.byte_level(tmp_path))
    assert tokenizer.token_bytes(tokenizer.size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([tokenizer.size + 5]) == ""


def test_special_tokens_are_added_and_skipped(tmp_path):
    text_models.byte_fallback(tmp_path)
    write_json(tmp_path, "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    tokenizer = Tokenizer.load(tmp_path)
    token_ids = tokenizer.encode("the", add_special_tokens=True)
    assert token_ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(token_ids) == "the"
    assert tokenizer.decode(token_ids, skip_special_tokens=False).startswith("<s>")
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, {5, 7, 2}),
        ({"temperature": 0.5}, {"eos_token_id": 9}, {9, 2}),
        (None, {"eos_token_id": 9}, {9, 2}),
        (None, {"text_config": {"eos_token_id": [4]}}, {4, 2}),
        (None, {"eos_token_id": None}, {2}),
    ],
)
def test_end_tokens_come_from_all_places(tmp_path, generation, config, expected):
    text_models.byte_fallback(tmp_path)
    write_json(tmp_path, "tokenizer_config.json", {"eos_token": "</s>"})
    write_json(tmp_path, "config.json", config)
    if generation is not None:
        write_json(tmp_path, "generation_config.json", generation)
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("wrong", ["</s>", [1, "x"], True, -1, {}])
def test_end_tokens_of_the_wrong_kind_are_named(tmp_path, wrong):
    text_models.byte_fallback(tmp_path)
    write_json(tmp_path, "config.json", {"eos_token_id": wrong})
    with pytest.raises(ModelLoadError, match=r"config\.json: eos_token_id"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": 5}'])
def test_a_corrupt_tokenizer_is_a_load_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    text_models.byte_level(tmp_path)
    path = tmp_path / "tokenizer.json"
    definition = json.loads(path.read_text())
    definition["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(definition))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("the quick brown fox", add_special_tokens=False)) > 2


_LOAD = """
import sys
from pathlib import Path
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import ModelLoadError
try:
    Tokenizer.load(Path(sys.argv[1]))
except ModelLoadError as error:
    print(error, error.hint, sep="\\n")
"""


def test_without_tokenizer_json_the_error_says_what_to_install(tmp_path):
    (packages := tmp_path / "packages").mkdir()
    done = run_without("transformers", _LOAD, str(tmp_path), folder=packages)
    assert "no tokenizer.json" in done.stdout, done.stderr
    assert "transformers" in done.stdout.splitlines()[-1]


def test_without_tokenizer_json_another_form_is_converted(tmp_path):
    pytest.importorskip("transformers")
    text_models.byte_level(tmp_path / "source")
    model = json.loads((tmp_path / "source" / "tokenizer.json").read_text())["model"]
    write_json(tmp_path, "vocab.json", model["vocab"])
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    write_json(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.form == "byte_level"
    assert tokenizer.decode(tokenizer.encode("the fox 日本", add_special_tokens=False)) == "the fox 日本"
    assert tokenizer.eos_token_ids == {model["vocab"]["<|end|>"]}


def test_a_folder_that_cannot_be_converted_is_a_load_error(tmp_path):
    pytest.importorskip("transformers")
    write_json(tmp_path, "config.json", {"model_type": "llama"})
    with pytest.raises(ModelLoadError, match="no tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_the_builtin_tokenizer_decodes_what_it_encodes():
    tokenizer = Tokenizer.load(BUILTIN_FOLDER)
    text = "What is 17 + 25? naïve 日本 🎉"
    assert tokenizer.form == "byte_level"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text
    assert tokenizer.eos_token_ids


@pytest.mark.parametrize("way", ["encode", "count", "decode"])
def test_long_texts_are_encoded_and_decoded_while_other_threads_run(way):
    """The library's `encode` and `decode` hold the interpreter's lock from their begin to their end."""
    tokenizer = Tokenizer.load(BUILTIN_FOLDER)
    calls = {
        "encode": lambda: tokenizer.encode("the quick brown fox jumps " * 50_000, add_special_tokens=False),
        "count": lambda: tokenizer.count("the quick brown fox jumps " * 50_000, add_special_tokens=False),
        "decode": lambda: tokenizer.decode([*range(300, 2000)] * 1_000),
    }
    begun, over, pause = threading.Event(), threading.Event(), threading.Event()
    turns = []

    def run():
        begun.wait()
        while not over.is_set():
            pause.wait(0.001)
            turns.append(over.is_set())

    other = threading.Thread(target=run)
    other.start()
    begun.set()
    try:
        assert calls[way]()
    finally:
        over.set()
        other.join()
    assert turns.count(False) > 10
