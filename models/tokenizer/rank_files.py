"""Vocabularies of byte sequences with ranks: Mistral's tekken.json and tiktoken's lines of base64."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from troupellm.models.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from troupellm.protocol.errors import ModelLoadError

_TEKKEN = "tekken.json"
_OLD_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of a tekken.json that lists none, as in mistral-common."""
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{index}|>" for index in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{index}|>" for index in range(5, 251)),
)
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
MOST_RESERVED = 4096
MOST_TOKEN_BYTES = 1024
"""Longest token: all of its cuts in two are tried."""


class _Family(NamedTuple):
    """A maker's tiktoken file."""

    rule: str
    """The row of `PRE_TOKENIZERS` that cuts its text."""
    special: tuple[str, ...] = ()
    """Special tokens behind the vocabulary where tokenizer_config.json lists none."""
    reserved: int = 0
    """The number of ids behind the vocabulary that are special tokens, named or not."""


_FAMILIES = {
    "llama": _Family("llama3", _LLAMA3_SPECIAL),
    "qwen": _Family("qwen2", _QWEN_SPECIAL),
    "kimi": _Family("kimi-k2", reserved=256),
    "glm4": _Family("glm4"),
}
_BY_TYPE = {
    "llama": "llama", "qwen": "qwen", "kimi_k2": "kimi", "kimi_linear": "kimi", "kimi_k25": "kimi", "glm4": "glm4",
    "chatglm": "glm4",
}  # fmt: skip
_BY_CLASS = {"QWenTokenizer": "qwen", "TikTokenTokenizer": "kimi", "ChatGLM4Tokenizer": "glm4"}


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int | None = None
    default_num_special_tokens: int | None = None


class _TekkenEntry(msgspec.Struct):
    rank: int
    token_bytes: str


class _TekkenSpecial(msgspec.Struct):
    rank: int
    token_str: str


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenEntry]
    special_tokens: list[_TekkenSpecial] | None = None


def tekken(data: bytes) -> Tokenizer:
    """
    Raises:
        ModelLoadError: not such a file, or ranks with gaps.
    """
    try:
        found = msgspec.json.decode(data, type=_Tekken)
        ranks = [base64.b64decode(entry.token_bytes, validate=True) for entry in found.vocab]
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{_TEKKEN} cannot be read: {error}") from error
    listed = found.special_tokens
    special = list(_OLD_SPECIAL) if listed is None else [t.token_str for t in sorted(listed, key=lambda t: t.rank)]
    if listed is not None and sorted(token.rank for token in listed) != [*range(len(listed))]:
        raise ModelLoadError(f"{_TEKKEN}: special_tokens must have the ranks 0 to {len(listed) - 1}")
    if [entry.rank for entry in found.vocab] != [*range(len(ranks))]:
        raise ModelLoadError(f"{_TEKKEN}: vocab must have the ranks 0 to {len(ranks) - 1}, in order")
    count = found.config.default_num_special_tokens
    count = len(special) if count is None else count
    if not len(special) <= count <= len(special) + MOST_RESERVED:
        raise ModelLoadError(f"{_TEKKEN}: default_num_special_tokens is {count}, but {len(special)} are listed")
    special += [f"<SPECIAL_{index}>" for index in range(len(special), count)]
    if found.config.default_vocab_size is not None:
        ranks = ranks[: max(0, found.config.default_vocab_size - count)]
    return _backend(
        _TEKKEN, {token: index + count for index, token in enumerate(ranks)}, found.config.pattern, special, 0
    )


def tiktoken(data: bytes, name: str, settings: dict[str, Any], config: dict[str, Any]) -> Tokenizer:
    """
    Args:
        name: of the file.
        settings: tokenizer_config.json.
        config: config.json.

    Raises:
        ModelLoadError: not such a file, or one whose model's pattern is not known.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelLoadError(f"{name}: line {number} is no token in base64 with a rank") from None
    if sorted(ranks.values()) != [*range(len(ranks))]:
        raise ModelLoadError(f"{name}: the ranks must be 0 to {len(ranks) - 1}, each once")
    kind = _BY_CLASS.get(str(settings.get("tokenizer_class"))) or _BY_TYPE.get(str(config.get("model_type")))
    if kind is None:
        raise ModelLoadError(
            f"{name} is a tiktoken vocabulary, which does not say how text is cut into words",
            hint="add tokenizer.json to the folder",
        )
    family = _FAMILIES[kind]
    special = _special(settings, len(ranks), family)
    backend = _backend(name, ranks, PRE_TOKENIZERS[family.rule].patterns[0], special, len(ranks))
    if PRE_TOKENIZERS[family.rule].compose:
        backend.normalizer = normalizers.NFC()
    return backend


def _special(settings: dict[str, Any], first: int, family: _Family) -> list[str]:
    """The special tokens from the id `first` on: named by tokenizer_config.json, or else by the family's rule."""
    listed = settings.get("added_tokens_decoder")
    named = {
        int(key): entry["content"]
        for key, entry in (listed.items() if isinstance(listed, dict) else ())
        if key.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
    }
    last = max([first + family.reserved - 1, *named])
    if last >= first + MOST_RESERVED:
        raise ModelLoadError(
            f"tokenizer_config.json: added_tokens_decoder has the id {last}, far beyond {first} tokens"
        )
    if not named and not family.reserved:
        return list(family.special)
    return [named.get(index, f"<|reserved_token_{index}|>") for index in range(first, last + 1)]


def _backend(name: str, ranks: dict[bytes, int], pattern: str, special: Sequence[str], first: int) -> Tokenizer:
    """Byte-level BPE that looks up whole words first.

    Args:
        name: of the file.
        ranks: ids by bytes; a lower one is merged earlier.
        special: the special tokens, which have the ids from `first` on.

    Raises:
        ModelLoadError: a token is too long.
    """
    longest = max(map(len, ranks), default=0)
    if longest > MOST_TOKEN_BYTES:
        raise ModelLoadError(f"{name}: a token has {longest} bytes; tokens of at most {MOST_TOKEN_BYTES} are read")
    spelled = {token: "".join(_ALPHABET[byte] for byte in token) for token in ranks}
    ids = {spelled[token]: number for token, number in ranks.items()}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in pairs]
    ids |= {text: first + index for index, text in enumerate(special)}
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return backend


def _alphabet() -> list[str]:
    """GPT-2's printable characters for the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


_ALPHABET = _alphabet()
