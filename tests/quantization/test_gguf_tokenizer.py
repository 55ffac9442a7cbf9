"""Tokenizers out of GGUF files: the same tokens and texts as the tokenizers that went in."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.config.generation_config import load_generation_defaults
from troupellm.models.config.model_documents import read_json
from troupellm.models.tokenizer.gguf_word_models import merges_of
from troupellm.models.tokenizer.tokenizer import Tokenizer as Ours
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.gguf.gguf_llama import SPECIAL, TEMPLATE, TEXT, add_byte_level, byte_level

TEXTS = (
    TEXT, "", " ", "  two  spaces ", "It'S WE'LL\n\n\tnow 12345 -- 6.", "d\u00e9j\u00e0 vu, \u6771\u4eac 2024\u5e74",
    "<|im_start|>user\nhi<|im_end|>", "e\u0301 composed", "\U0001f600 smile",
)  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write(path: Path, add: Callable[[gguf.GGUFWriter], object]) -> Path:
    """A file with a tokenizer and hardly a model."""
    writer = gguf.GGUFWriter(str(path), "llama")
    add(writer)
    for name, value in {
        "context_length": 64,
        "embedding_length": 4,
        "block_count": 1,
        "feed_forward_length": 4,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_qwen2(tokenizer: Tokenizer) -> None:
    """By the class of the library that has the model."""
    model = json.loads(tokenizer.to_str())["model"]
    reference = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = reference.backend_tokenizer.pre_tokenizer


def as_llama3(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def as_smollm(tokenizer: Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.mark.parametrize(
    ("pre", "change"),
    [("gpt-2", None), ("qwen2", as_qwen2), ("llama-bpe", as_llama3), ("smollm", as_smollm)],
)
def test_a_byte_level_tokenizer_of_a_gguf_file_encodes_alike(
    tmp_path: Path, pre: str, change: Callable[[Tokenizer], None] | None
) -> None:
    reference = byte_level()
    if change is not None:
        change(reference)
    path = write(tmp_path / "a.gguf", lambda writer: add_byte_level(writer, reference, pre))
    ours = Ours.load(path)
    assert ours.form == "byte_level"
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=True) == ids, text
        assert b"".join(map(ours.token_bytes, ids)).decode() == normalizers.NFC().normalize_str(text) or pre != "qwen2"
    assert {ours.token_bytes(i).decode() for i in ours.special_token_ids} == set(SPECIAL)
    assert ours.eos_token_ids == {reference.token_to_id(token) for token in (SPECIAL[0], SPECIAL[2])}
    assert ours.bos_token_id is None


def sentence_piece(writer: gguf.GGUFWriter) -> tuple[list[str], list[float]]:
    """A vocabulary like Llama 2's: three special tokens, 256 bytes, letters, and pieces with falling scores."""
    letters = sorted({"\u2581", *TEXT.replace(" ", "")})
    pieces = ["he", "\u2581t", "\u2581the", "er", "ov", "\u2581ov", "\u2581over", "in", "qu", "\u2581qu", "ick",
              "ic", "\u2581\u2581", "the", "th", "ck", "\u2581quick"]  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    kinds = [2, 3, 3, *([6] * 256), *([1] * (len(tokens) - 259))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return tokens, scores


def spelled(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's own way: join the two neighbours that make the best token, from the left, until none do."""
    ids = {token: index for index, token in enumerate(tokens)}
    pieces = list(("\u2581" + text).replace(" ", "\u2581")) if text else []
    while True:
        joins = [
            (-scores[ids[a + b]], place) for place, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids
        ]
        if not joins:
            break
        place = min(joins)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    found = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


def test_a_sentencepiece_tokenizer_of_a_gguf_file_encodes_alike(tmp_path: Path) -> None:
    kept: list[tuple[list[str], list[float]]] = []
    path = write(tmp_path / "a.gguf", lambda writer: kept.append(sentence_piece(writer)))
    tokens, scores = kept[0]
    ours = Ours.load(path)
    assert ours.form == "byte_fallback"
    assert (ours.bos_token_id, ours.eos_token_ids, len(ours.byte_token_ids)) == (1, {2}, 256)
    for text in TEXTS:
        if "<|" in text:
            continue
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == [1, *spelled(text, tokens, scores)], text
        assert ours.decode(ids) == text
    assert ours.encode("the</s>the", add_special_tokens=False).count(2) == 1


def test_merges_come_best_first() -> None:
    vocabulary = {token: index for index, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    assert merges_of(vocabulary, [0.0, 0.0, 0.0, -2.0, -1.0, -3.0]) == [
        ("b", "c"),
        ("a", "b"),
        ("a", "bc"),
        ("ab", "c"),
    ]


def test_templates_ends_and_sampling(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, byte_level(), "gpt-2")
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_uint32("general.sampling.top_k", 20)

    path = write(tmp_path / "a.gguf", add)
    template = ChatTemplate.load(path, None)
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.sources == {"default": TEMPLATE}
    assert load_generation_defaults(path, "auto") == {"temperature": 0.5, "top_k": 20}
    assert read_json(path / "tokenizer_config.json")["eos_token"] == SPECIAL[2]
    assert read_json(path / "modules.json") == {}


def add_pair(writer: gguf.GGUFWriter, **changes: object) -> None:
    """Three tokens, one of them wrong in some way."""
    settings = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab"],
        "types": [1, 1, 1],
        "merges": ["a b"],
        "eos": 2,
    }
    settings |= changes
    writer.add_tokenizer_model(settings["model"])
    writer.add_tokenizer_pre(settings["pre"])
    writer.add_token_list(settings["tokens"])
    writer.add_token_types(settings["types"])
    writer.add_token_merges(settings["merges"])
    writer.add_eos_token_id(settings["eos"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, 'tokenizer.ggml.model must be one of gpt2, llama, gemma4, bert, t5, got "rwkv"'),
        ({"model": "llama"}, "tokenizer.ggml.scores is for 0 of 3 tokens"),
        ({"pre": "superbpe"}, "tokenizer.ggml.pre must be one of llama3, "),
        ({"tokens": ["a", "a", "ab"]}, "tokenizer.ggml.tokens has a token twice"),
        ({"types": [1, 1]}, "tokenizer.ggml.token_type is for 2 of 3 tokens"),
        ({"pre": "default"}, "tokenizer.ggml.pre does not say how text is cut into words, nor does architecture llama"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges must be pairs of tokens, and 'a' is none"),
        ({"merges": ["x y"]}, "the tokenizer cannot be built"),
        ({"eos": 9}, "tokenizer.ggml.eos_token_id must be below 3"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write(tmp_path / "a.gguf", lambda writer: add_pair(writer, **changes))
    with pytest.raises(ModelLoadError, match=f"^a.gguf: {message}"):
        Ours.load(path)
