"""Special tokens, chat templates and sampling defaults of a GGUF file, as a model folder's JSON files have them."""

from typing import Any

from troupellm.models.gguf.header import Header
from troupellm.models.hf_config import ConfigReader
from troupellm.protocol.errors import ModelLoadError

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
    tokens = header.metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelLoadError(
            f"{header.name}: {_PREFIX}tokens is missing", hint="name a folder with a tokenizer by --tokenizer"
        )
    kinds = header.metadata.get(f"{_PREFIX}token_type")
    kinds = [1] * len(tokens) if kinds is None else list(kinds)
    if len(kinds) != len(tokens):
        raise ModelLoadError(f"{header.name}: {_PREFIX}token_type is for {len(kinds)} of {len(tokens)} tokens")
    return tokens, kinds


def special_id(header: Header, key: str) -> int | None:
    """A token id that the metadata names.

    Raises:
        ModelLoadError: no token has it.
    """
    reader, tokens = ConfigReader(header.metadata, file=header.name), header.metadata.get(f"{_PREFIX}tokens", ())
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
            found[name] = header.metadata[f"{_PREFIX}tokens"][index]
    templates = {"default": header.metadata.get("tokenizer.chat_template")}
    for name in header.metadata.get("tokenizer.chat_templates", ()):
        templates[str(name)] = header.metadata.get(f"tokenizer.chat_template.{name}")
    named = [{"name": name, "template": text} for name, text in templates.items() if text is not None]
    return found | ({"chat_template": named} if named else {})


def generation_config(header: Header) -> dict[str, Any]:
    """What generation_config.json would say: the sampling that the model's maker recommends."""
    return {theirs: header.metadata[key] for key, theirs in _SAMPLING.items() if header.metadata.get(key) is not None}
