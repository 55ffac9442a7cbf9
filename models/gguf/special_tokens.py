"""Special tokens, chat templates and sampling defaults of a GGUF file, as a model folder's JSON files have them."""

from array import array
from typing import Any

from troupellm.models.gguf.header import Header
from troupellm.models.hf_config import ConfigReader
from troupellm.protocol.errors import InvalidRequest, ModelLoadError
from troupellm.protocol.sampling import SamplingParams

CONTROL, USER_DEFINED = 3, 4
_PREFIX = "tokenizer.ggml."
_SPECIAL = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "mask_token": "mask_token_id",
}  # fmt: skip
"""Names in tokenizer_config.json and in the file, one of them misspelled in the format itself."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"}
)
"""Control tokens that end an answer even where the file names only one of them; llama.cpp has the same rule."""
_SAMPLING = {
    "general.sampling.temp": "temperature", "general.sampling.top_k": "top_k", "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p", "general.sampling.penalty_repeat": "repetition_penalty",
}  # fmt: skip


def vocabulary(header: Header) -> tuple[list[str], list[int]]:
    """The tokens and what kind each of them is.

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
    return tokens, kinds.tolist()


def _tokens(header: Header) -> list[str]:
    """None where the file has no tokenizer."""
    return _texts(header, f"{_PREFIX}tokens")


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
    """A token id that the metadata names.

    Raises:
        ModelLoadError: no token has it.
    """
    reader, tokens = ConfigReader(header.metadata, file=header.name), _tokens(header)
    key = f"{_PREFIX}{key}"
    if not reader.has(key):
        return None
    found = reader.integer(key, least=0)
    if found >= len(tokens):
        raise reader.refuse(key, f"must be below {len(tokens)}, the number of tokens")
    return found


def end_ids(header: Header) -> list[int]:
    """Tokens that end an answer."""
    named = {found for key in _ENDS if (found := special_id(header, key)) is not None}
    if f"{_PREFIX}tokens" in header.metadata:
        tokens, kinds = vocabulary(header)
        named |= {
            index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED) and token in _END_TEXTS
        }
    return sorted(named)


def tokenizer_config(header: Header) -> dict[str, Any]:
    """What tokenizer_config.json would say: the special tokens' texts and the chat templates."""
    found: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        index = special_id(header, key)
        if index is not None:
            found[name] = _tokens(header)[index]
    templates = {"default": _text(header, "tokenizer.chat_template")}
    for name in _texts(header, "tokenizer.chat_templates"):
        templates[name] = _text(header, f"tokenizer.chat_template.{name}")
    named = [{"name": name, "template": text} for name, text in templates.items() if text is not None]
    return found | ({"chat_template": named} if named else {})


def generation_config(header: Header) -> dict[str, Any]:
    """What generation_config.json would say: the sampling that the model's maker recommends.

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
