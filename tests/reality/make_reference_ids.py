"""Makes tests/quantization/reference_ids.json: small vocabularies, and the ids that other tools give to awkward texts.

Run as `python tests/reality/make_reference_ids.py`, after `make references` and with `gguf` and `regex` installed.
llama.cpp gives the ids, except for the rules of `PUBLIC`, whose patterns it simplifies: their ids come from the
patterns that the models' makers published, applied by the package `regex`.
"""

import itertools
import json
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import regex
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from troupellm.models.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from troupellm.tests.support.checkpoints.awkward_texts import SPECIAL as WITH_SPECIAL, TEXTS, WORDS
from troupellm.tests.support.gguf import llama_cpp
from troupellm.tests.support.gguf.gguf_vocabulary import STORED, write_vocabulary

COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen", "megrez", "qwen35", "command-r"})
"""The models' own tokenizers normalize to NFC; llama.cpp does not, so it is given composed texts."""
SPECIAL = {"<s>": 3, "</s>": 3, "<|start|>": 3, "<think>": 4, "  <two  spaces>": 4, "": 1, "[unused]": 5}
"""Further tokens and their kinds; llama.cpp calls the empty one `[EMPTY_n]`."""
WHOLE = ("\u0120trailing", "Hello", "\u010a\u010a\u010a", "co-operate", "def")
"""Tokens that no merge makes: they come out only where a whole word is looked up first."""
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
)
_ENDING = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = _CASED.replace("END", _ENDING) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_KIMI = (
    r"[\p{Han}]+|"
    + _CASED.replace("END", _ENDING).replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    + _SPACES
)
PUBLIC = {
    "tekken": _CASED.replace("END", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,
    "gpt-4o": _O200K, "llama4": _O200K, "minimax-m2": _O200K, "kimi-k2": _KIMI,
}  # fmt: skip
PARTLY_PUBLIC = {
    "deepseek-llm": ("ideographic\u3000space", "a\u2028b\u2029c"),
    "deepseek-coder": ("ideographic\u3000space", "a\u2028b\u2029c"),
    "unigram": (" ", "  ", "   "),
    "words": (WORDS[16], WORDS[19], WORDS[26], WORDS[27], WORDS[28], "\u0928\u094d\u092f\u093e"),
}
"""Texts that are not compared: llama.cpp's patterns do not see these spaces, and for BERT it strips every mark, while
BERT's own tokenizer strips those that take no space of their own (Mn). Its Unigram puts no space before spaces."""


def bytes_vocabulary(size: int) -> dict[str, Any]:
    """Byte-level BPE, trained on texts that nothing cuts into words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokens, merges = train(tokenizer, trainer)
    tokens += [token for token in WHOLE if token not in tokens]
    return {
        "tokens": [*tokens, *SPECIAL],
        "types": [1] * len(tokens) + [*SPECIAL.values()],
        "merges": merges,
        "settings": {"model": "gpt2", "bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1},
    }


def train(tokenizer: Tokenizer, trainer: Any) -> tuple[list[str], list[str]]:
    texts = [text for text in TEXTS if text not in WITH_SPECIAL]
    tokenizer.train_from_iterator([*texts, *texts], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(pair) for pair in model.get("merges", [])]


def piece_vocabulary(size: int, *, merges: bool) -> dict[str, Any]:
    """SentencePiece's kind of BPE: bytes for rare characters, and scores or merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=size, limit_alphabet=220, show_progress=False)
    tokens, pairs = train(tokenizer, trainer)
    tokens = [token for token in tokens if "\n" not in token or not merges or not token.strip("\n")]
    pairs = [pair for pair in pairs if pair.replace(" ", "", 1) in tokens and " " not in pair[0]]
    first = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(256)}}
    last = {"<|start|>": 3, "<think>": 4, "    ": 4, "": 1, "[unused]": 5}
    named = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    found = {
        "tokens": [*first, *tokens, *last],
        "types": [*first.values(), *([1] * len(tokens)), *last.values()],
        "settings": {"model": "gemma4"} | named if merges else {"model": "llama", "pre": "default"} | named,
    }
    if merges:
        return found | {"merges": pairs}
    return found | {"scores": [0.0] * len(first) + [-float(rank) for rank in range(len(tokens) + len(last))]}


def word_vocabulary(size: int) -> dict[str, Any]:
    """BERT's WordPiece, spelled as llama.cpp's converter does it: U+2581 where a word starts."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, limit_alphabet=200, show_progress=False)
    tokens, _ = train(tokenizer, trainer)
    spelled = [token[2:] if token.startswith("##") else f"\u2581{token}" for token in tokens]
    first = {"[PAD]": 3, "[UNK]": 3, "[CLS]": 3, "[SEP]": 3, "[MASK]": 3}
    ids = {"padding_token_id": 0, "unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3, "mask_token_id": 4}
    return {
        "tokens": [*first, *spelled],
        "types": [*first.values(), *([1] * len(spelled))],
        "settings": {"model": "bert", "token_type_count": 2, "eos_token_id": 3} | ids,
    }


def unigram_vocabulary(size: int) -> dict[str, Any]:
    """SentencePiece's Unigram, without a map of characters."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=size, show_progress=False, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    train(tokenizer, trainer)
    entries = json.loads(tokenizer.to_str())["model"]["vocab"]
    return {
        "tokens": [token for token, _ in entries],
        "types": [3, 3, 2, *([1] * (len(entries) - 3))],
        "scores": [score for _, score in entries],
        "settings": {
            "model": "t5",
            "pre": "default",
            "padding_token_id": 0,
            "eos_token_id": 1,
            "unknown_token_id": 2,
            "add_space_prefix": True,
            "remove_extra_whitespaces": False,
        },
    }


def published(text: str, pattern: str, vocabulary: dict[str, Any]) -> list[int]:
    """Ids by a published pattern, plain merging and a plain search for special tokens."""
    ids = {token: index for index, token in enumerate(vocabulary["tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(vocabulary["merges"])}
    shown = byte_alphabet()
    matched = sorted((token for token, kind in SPECIAL.items() if kind in (3, 4)), key=len, reverse=True)
    found: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, matched)) + ")", text):
        if part in matched:
            found.append(ids[part])
            continue
        for word in regex.findall(pattern, part, regex.V1):
            pieces = [shown[byte] for byte in word.encode()]
            if pattern == PUBLIC["tekken"] and "".join(pieces) in ids:
                pieces = ["".join(pieces)]
            while len(pieces) > 1:
                rank, place = min(
                    (ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(itertools.pairwise(pieces))
                )
                if rank == len(ranks):
                    break
                pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
            found += [ids[piece] for piece in pieces]
    return found


def byte_alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def main() -> None:
    vocabularies = {
        "bytes": bytes_vocabulary(1400), "pieces": piece_vocabulary(900, merges=False),
        "gemma4": piece_vocabulary(900, merges=True), "words": word_vocabulary(700), "unigram": unigram_vocabulary(700),
    }  # fmt: skip
    cases = {rule: ("bytes", {"pre": rule}) for rule in PRE_TOKENIZERS} | {
        name: (name, {}) for name in vocabularies if name != "bytes"
    }
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            (
                write_vocabulary(Path(folder) / f"{name}.gguf", vocabularies[kind], **settings),
                [unicodedata.normalize("NFC", text) if name in COMPOSED else text for text in TEXTS],
            )
            for name, (kind, settings) in cases.items()
        ]
        answers = dict(zip(cases, llama_cpp.token_ids(jobs), strict=True))
    for rule, pattern in PUBLIC.items():
        answers[rule] = [published(text, pattern, vocabularies["bytes"]) for text in TEXTS]
    distinct: list[list[list[int]]] = [[] for _ in TEXTS]
    rows: dict[str, list[int | None]] = {}
    for name in cases:
        rows[name] = []
        for text, ids, known in zip(TEXTS, answers[name], distinct, strict=True):
            if text in PARTLY_PUBLIC.get(name, ()):
                rows[name].append(None)
                continue
            if ids not in known:
                known.append(ids)
            rows[name].append(known.index(ids))
    result = {
        "vocabularies": vocabularies,
        "cases": {name: {"vocabulary": kind, "settings": settings} for name, (kind, settings) in cases.items()},
        "ids": distinct,
        "rows": rows,
    }
    STORED.write_text(json.dumps(result, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
