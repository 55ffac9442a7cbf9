"""A folder's tokenizer files, mixed as published models mix them: the ids are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import text_models
from awkward_texts import TEXTS
from transformers import AutoTokenizer

from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import ModelLoadError

Files = dict[str, Any]
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
MARKS = ("<extra>", "<stripped>", "<word>", "<plain>", "<pad>", "<image>", "<|start|>", "</s>", "<s>")
"""Texts that the files make tokens of, or not."""
ALL_TEXTS = (*TEXTS, *(f"a {mark} b{mark}c\n{mark}" for mark in MARKS), "x <extra><pad> the <word>s quick")


def entry(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text} | FLAGS | flags


def typed(text: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken"} | entry(text, **flags)


def listed(first: int, *entries: dict[str, Any]) -> Files:
    return {"added_tokens_decoder": {str(first + index): value for index, value in enumerate(entries)}}


def config(**settings: Any) -> Files:
    return {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | settings}


BYTES: dict[str, Files] = {
    "nothing beside it": {},
    "flags for BOS and EOS": config(add_bos_token=True, add_eos_token=True, bos_token="<|start|>", eos_token="<|end|>"),
    "a named token that is ordinary": config(eos_token="the"),
    "a named token that is new": config(pad_token="<pad>", eos_token="<|end|>"),
    "named tokens with flags": config(pad_token=typed("<pad>", lstrip=True), mask_token=typed("<word>", rstrip=True)),
    "a list without tokens": config(added_tokens_decoder={}, pad_token="<pad>"),
    "a list with new tokens": config(**listed(331, entry("<extra>"), entry("<stripped>", lstrip=True, rstrip=True))),
    "a list with other flags": config(**listed(0, entry("<|end|>"), entry("<|start|>", special=False, rstrip=True))),
    "a list with plain tokens": config(
        **listed(331, entry("<plain>", special=False, normalized=True), entry("<word>", single_word=True))
    ),
    "further special tokens": config(additional_special_tokens=["<extra>", "<image>"]),
    "further special tokens by name": config(extra_special_tokens={"image_token": "<image>"}, audio_token="<extra>"),
    "a list and an unused map": config(**listed(0, entry("<|end|>")))
    | {"special_tokens_map.json": {"pad_token": "<pad>"}, "added_tokens.json": {"<extra>": 331}},
    "a map alone": {"special_tokens_map.json": {"pad_token": "<pad>", "eos_token": entry("<|end|>", rstrip=True)}},
    "a map over the settings": config(pad_token="<pad>") | {"special_tokens_map.json": {"pad_token": "<extra>"}},
    "a map with further tokens": {"special_tokens_map.json": {"additional_special_tokens": ["<extra>", "<word>"]}},
    "a map and settings with further tokens": config(additional_special_tokens=["<image>"])
    | {"special_tokens_map.json": {"additional_special_tokens": ["<extra>"]}},
    "added tokens alone": {"added_tokens.json": {"<plain>": 331, "<extra>": 332}},
    "added tokens that are named": config(pad_token="<extra>")
    | {"added_tokens.json": {"<plain>": 331, "<extra>": 332}},
    "everything": config(eos_token="<|end|>", pad_token="<pad>", additional_special_tokens=["<image>"])
    | {
        "special_tokens_map.json": {"eos_token": entry("<|end|>", lstrip=True), "unk_token": "<word>"},
        "added_tokens.json": {"<plain>": 331, "<pad>": 332},
    },
}
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
NAMES = listed(0, *(entry(text, normalized=True) for text in ("<unk>", "<s>", "</s>")))
CHUNKS: dict[str, Files] = {
    "LlamaTokenizer": config(**LLAMA),
    "LlamaTokenizerFast": config(tokenizer_class="LlamaTokenizerFast", legacy=False),
    "LlamaTokenizer, legacy": config(**LLAMA, legacy=True),
    "LlamaTokenizer, null": config(**LLAMA, legacy=None, add_prefix_space=None),
    "LlamaTokenizer, no prefix": config(**LLAMA, add_prefix_space=False, legacy=True),
    "LlamaTokenizer with a list": config(**LLAMA, **NAMES, add_bos_token=True, add_eos_token=True),
    "LlamaTokenizer, legacy with a list": config(**LLAMA, **NAMES, legacy=True, pad_token="<pad>"),
    "LlamaTokenizer of another type": config(**LLAMA) | {"config.json": {"model_type": "mistral"}},
    "LlamaTokenizer of phi3": config(**LLAMA) | {"config.json": {"model_type": "phi3"}},
    "LlamaTokenizer of gemma": config(**LLAMA) | {"config.json": {"model_type": "gemma"}},
    "GemmaTokenizer": config(tokenizer_class="GemmaTokenizer") | {"config.json": {"model_type": "gemma2"}},
    "GemmaTokenizer of llama": config(tokenizer_class="GemmaTokenizer"),
    "PreTrainedTokenizerFast": config(legacy=True, add_prefix_space=False),
    "a class of the model's config": {"config.json": {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}},
    "no class": {"tokenizer_config.json": {}},
}


def check(folder: Path, files: Files) -> None:
    for name, value in ({"config.json": {"model_type": "llama"}} | files).items():
        (folder / name).write_text(json.dumps(value))
    reference, ours = AutoTokenizer.from_pretrained(str(folder)), Tokenizer.load(folder)
    for text in ALL_TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special), text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    special_ids = {number for number, token in reference.added_tokens_decoder.items() if token.special}
    assert ours.special_token_ids == special_ids


@pytest.mark.parametrize("files", BYTES.values(), ids=BYTES)
def test_byte_level_files(tmp_path: Path, files: Files) -> None:
    check(text_models.byte_level(tmp_path), files)


@pytest.mark.parametrize("files", CHUNKS.values(), ids=CHUNKS)
def test_files_of_pieces(tmp_path: Path, files: Files) -> None:
    check(text_models.byte_fallback(tmp_path), files)


def test_a_declared_llama_tokenizer_is_not_believed_beside_a_byte_level_file(tmp_path: Path) -> None:
    check(text_models.byte_level(tmp_path), config(**LLAMA))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (config(added_tokens_decoder=[]), "tokenizer_config.json: added_tokens_decoder must be an object of tokens"),
        (config(added_tokens_decoder={"x": {}}), r"tokenizer_config.json: added_tokens_decoder\['x'\] must be a token"),
        (config(**listed(400, entry("<extra>"))), "tokenizer_config.json: added token '<extra>' has the id 400, but"),
        ({"added_tokens.json": {"<extra>": 400}}, "added_tokens.json: added token '<extra>' has the id 400, but"),
        ({"added_tokens.json": {"<extra>": "x"}}, "added_tokens.json: '<extra>' must have a token id, got 'x'"),
        (config(**listed(331, entry("<extra>") | {"lstrip": "yes"})), "the flags of token '<extra>' must be true or"),
    ],
)
def test_files_that_name_no_tokens_are_refused(tmp_path: Path, files: Files, message: str) -> None:
    folder = text_models.byte_level(tmp_path)
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.load(folder)
