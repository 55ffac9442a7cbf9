"""Special tokens, chat templates and sampling defaults of a GGUF file, as a model folder's JSON files have them."""

from array import array
from typing import Any

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.gguf_header import Header
from troupellm.protocol.errors import InvalidRequest, ModelLoadError
from troupellm.protocol.params.sampling import SamplingParams

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Kinds of `tokenizer.ggml.token_type` other than ordinary tokens."""
_PREFIX = "tokenizer.ggml."
_SPECIAL = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "mask_token": "mask_token_id",
}  # fmt: skip
"""Names in tokenizer_config.json and in the file, one of them misspelled in the format itself."""
_DEFAULT_IDS = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "bert": {
        "bos_token_id": 101, "unknown_token_id": 100, "seperator_token_id": 102, "padding_token_id": 0,
        "mask_token_id": 103,
    },
    "t5": {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0},
}  # fmt: skip
"""By tokenizer model: default ids if a file names none, as in llama.cpp. Byte-level models have none."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    }
)  # fmt: skip
"""Tokens that end an answer even where the file does not name them; llama.cpp has the same list."""
_TAG = "</s>"
"""An end if it is a control token; Gemma has it as a user-defined one, for HTML, and its answers go on behind it."""
_NO_ENDS = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|flush|>", "<|calls|>")),
    (_TAG, ("<|tool_response>",)),
)
"""A text that is no end where all of the others are tokens: `<|end|>` closes only a message of gpt-oss."""
_SAMPLING = {
    "general.sampling.temp": "temperature", "general.sampling.top_k": "top_k", "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p", "general.sampling.penalty_repeat": "repetition_penalty",
}  # fmt: skip


def vocabulary(header: Header) -> tuple[list[str], list[int]]:
    """The tokens and the kind of each.

    Raises:
        ModelLoadError: there are none, or a kind for some of them only.
    """
    tokens, key = _tokens(header), f"{_PREFIX}token_type"
    if not tokens:
        raise ModelLoadError(
            f"{header.name}: {_PREFIX}tokens is missing", hint="name a folder with a tokenizer by --tokenizer"
        )
    kinds = header.metadata.get(key)
    if kinds is None:
        return tokens, [1] * len(tokens)
    if not isinstance(kinds, array) or kinds.typecode in "fd":
        raise ModelLoadError(f"{header.name}: {key} must be an array of integers")
    if len(kinds) != len(tokens):
        raise ModelLoadError(f"{header.name}: {key} is for {len(kinds)} of {len(tokens)} tokens")
    found = kinds.tolist()
    for index, token in enumerate(tokens):
        if token.startswith("<|") and token in _END_TEXTS and found[index] == 1:
            found[index] = CONTROL  # some converters mark it as an ordinary token
    return tokens, found


def _tokens(header: Header) -> list[str]:
    """Empty where the file has no tokenizer. An empty token is called as in llama.cpp, since no text can be empty."""
    return [text or f"[EMPTY_{index}]" for index, text in enumerate(_texts(header, f"{_PREFIX}tokens"))]


def _texts(header: Header, key: str) -> list[str]:
    """An array of texts; arrays hold values of one type."""
    found = header.metadata.get(key, [])
    if not isinstance(found, list | array) or not all(isinstance(text, str) for text in found[:1]):
        raise ModelLoadError(f"{header.name}: {key} must be an array of texts")
    return list(found)


def _text(header: Header, key: str) -> str | None:
    found = header.metadata.get(key)
    if found is not None and not isinstance(found, str):
        raise ModelLoadError(f"{header.name}: {key} must be text")
    return found


def special_id(header: Header, key: str) -> int | None:
    """A token id that the metadata names, or else the one that is usual for the tokenizer's model.

    Raises:
        ModelLoadError: the metadata names an id that no token has.
    """
    reader, size = ConfigReader(header.metadata, file=header.name), len(_tokens(header))
    if not reader.has(f"{_PREFIX}{key}"):
        kind = header.metadata.get(f"{_PREFIX}model")
        usual = _DEFAULT_IDS.get(kind, {}).get(key) if isinstance(kind, str) else None
        return usual if usual is not None and usual < size else None
    key = f"{_PREFIX}{key}"
    found = reader.integer(key, least=0)
    if found >= size:
        raise reader.refuse(key, f"must be below {size}, the number of tokens")
    return found


def end_ids(header: Header) -> list[int]:
    """Tokens that end an answer: those that the file names, and those with a text that is known to be an end."""
    named = {found for key in _ENDS if (found := special_id(header, key)) is not None}
    if f"{_PREFIX}tokens" not in header.metadata:
        return sorted(named)
    tokens, kinds = vocabulary(header)
    ends = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if token in _END_TEXTS and (kind == CONTROL or (kind == USER_DEFINED and token != _TAG))
    }
    excepted = {ends.get(text) for text, others in _NO_ENDS if ends.keys() >= {*others}}
    return sorted((named | set(ends.values())) - excepted)


def tokenizer_config(header: Header) -> dict[str, Any]:
    """The corresponding tokenizer_config.json: the special tokens' texts and the chat templates."""
    found: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        index = special_id(header, key)
        if index is not None:
            found[name] = _tokens(header)[index]
    prefix = "tokenizer.chat_template"
    templates = {"default": _text(header, prefix)}
    for key in header.metadata:
        if key.startswith(f"{prefix}."):
            templates[key.removeprefix(f"{prefix}.")] = _text(header, key)
    named = [{"name": name, "template": text} for name, text in templates.items() if text is not None]
    return found | ({"chat_template": named} if named else {})


def generation_config(header: Header) -> dict[str, Any]:
    """The corresponding generation_config.json: the sampling that the model's maker recommends.

    Raises:
        ModelLoadError: a value that `SamplingParams` refuses.
    """
    found: dict[str, Any] = {}
    for key, theirs in _SAMPLING.items():
        if key in header.metadata:
            found[theirs] = header.metadata[key]
            try:
                SamplingParams(**{theirs: found[theirs]})
            except InvalidRequest as error:
                raise ModelLoadError(f"{header.name}: {key} is refused: {error.message}") from error
    return found
