"""Makes tests/models/reference_tokenizers.json: tokenizer files older than tokenizer.json, and ids of awkward texts.

Run as `python tests/reality/make_reference_tokenizers.py` with sentencepiece, protobuf, tiktoken and transformers
installed. The ids come from sentencepiece, from tiktoken with the patterns that the models' makers published, or from
transformers, as each case says.
"""

import base64
import io
import json
import os
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
from transformers import AutoTokenizer

from troupellm.tests.support.checkpoints.awkward_texts import SPECIAL as WITH_SPECIAL, TEXTS
from troupellm.tests.support.checkpoints.older_tokenizers import STORED, ranks, write

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
_KIMI = (
    rf"[\p{{Han}}]+|{_CASED}|{_CASED.replace('*[', '+[').replace(']+(?i', ']*(?i')}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def pieces(algorithm: str, **options: Any) -> bytes:
    """A small SentencePiece model."""
    written = io.BytesIO()
    texts = [text for text in TEXTS if text not in WITH_SPECIAL and text.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts, *texts]),
        model_writer=written,
        model_type=algorithm,
        vocab_size=800,
        hard_vocab_limit=False,
        character_coverage=0.98,
        normalization_rule_name="identity",
        minloglevel=2,
        **options,
    )
    return written.getvalue()


def by_tiktoken(pattern: str, special: dict[str, int], *, compose: bool = False) -> list[list[int]]:
    encoding = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=special)
    texts = [unicodedata.normalize("NFC", text) if compose else text for text in TEXTS]
    return [encoding.encode(text, allowed_special="all") for text in texts]


def by_transformers(files: dict[str, Any]) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), files)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return [tokenizer.encode(text) for text in TEXTS]


def by_sentencepiece(model: bytes) -> list[list[int]]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.encode(text) for text in TEXTS]


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main() -> None:
    plain = {"remove_extra_whitespaces": False}
    bpe = pieces("bpe", byte_fallback=True, user_defined_symbols=["<think>"], **plain)
    own = pieces("bpe", add_dummy_prefix=False, **plain)
    unigram = pieces("unigram", byte_fallback=True, **plain)
    merging = pieces("unigram", remove_extra_whitespaces=True)
    first = len(ranks())
    llama = {"config.json": {"model_type": "llama"}}
    cases: dict[str, tuple[dict[str, Any], str, list[list[int]] | None]] = {}

    def add(name: str, files: dict[str, Any], reference: str, ids: list[list[int]] | None = None) -> None:
        cases[name] = files, reference, ids

    for name, settings in {
        "LlamaTokenizer": {"add_bos_token": True},
        "LlamaTokenizer, legacy": {"legacy": True},
        "LlamaTokenizer, both ends": {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": False},
    }.items():
        config = {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"} | settings}
        add(name, {"tokenizer.model": text_of(bpe)} | llama | config, "transformers")
    add("no class, bpe", {"tokenizer.model": text_of(own)} | llama, "sentencepiece", by_sentencepiece(own))
    add("no class, unigram", {"tokenizer.model": text_of(unigram)} | llama, "sentencepiece", by_sentencepiece(unigram))
    add("no class, merging", {"tokenizer.model": text_of(merging)} | llama, "sentencepiece", by_sentencepiece(merging))
    for name, file, kind, pattern, special in (
        ("llama 3", "tokenizer.model", "llama", _CL100K, {"<|begin_of_text|>": first, "<|end_of_text|>": first + 1}),
        ("glm-4", "tokenizer.model", "glm4", _CL100K, {"<|start|>": first, "<s>": first + 2}),
        ("kimi", "tiktoken.model", "kimi_k2", _KIMI, {"<|start|>": first, "<s>": first + 2}),
        ("qwen 1", "qwen.tiktoken", "qwen", _CL100K.replace("{1,3}", ""), {"<|endoftext|>": first}),
    ):
        config = {"config.json": {"model_type": kind}}
        if "<s>" in special:
            listed = {str(number): {"content": text, "special": True} for text, number in special.items()}
            config["tokenizer_config.json"] = {"added_tokens_decoder": listed}
        ids = by_tiktoken(pattern, special, compose=kind == "qwen")
        add(name, {file: "ranks"} | config, "tiktoken", ids)
    names = ["<unk>", "<s>", "</s>", "<|start|>", "[INST]", "[/INST]"]
    tekken = {
        "config": {"pattern": _TEKKEN, "default_vocab_size": first + 10, "default_num_special_tokens": 10},
        "vocab": "ranks",
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(names)],
    }
    flags = {"tokenizer_config.json": {"add_bos_token": False}}
    add("tekken", {"tekken.json": tekken, "config.json": {"model_type": "mistral"}} | flags, "transformers")
    found = {
        name: {"reference": reference, "files": files, "ids": by_transformers(files) if ids is None else ids}
        for name, (files, reference, ids) in cases.items()
    }
    STORED.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    main()
