"""The library's tokenizer of a model folder: from tokenizer.json and the files beside it, or else from an older format.

The rules are those of transformers 5: tokenizer.json counts, but a declared LlamaTokenizer or GemmaTokenizer brings its
own normalization, and the files beside it add tokens. `add_bos_token` and `add_eos_token` count only without it.
"""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from troupellm.models.added_tokens import TokenFiles, tokens_to_add
from troupellm.models.declared_tokenizer import Declared, declared, declared_rules, default_names, unknown_token
from troupellm.models.model_documents import read_json
from troupellm.models.model_folder import check_file, check_for_tokenizers
from troupellm.models.panics import no_panics
from troupellm.protocol.errors import ModelLoadError

_FILE = "tokenizer.json"


class _Definition(msgspec.Struct):
    """tokenizer.json, as far as it is looked into here."""

    model: msgspec.Raw
    added_tokens: list[dict[str, Any]] = []


class _Model(msgspec.Struct):
    """A tokenizer's model; vocabulary and merges stay as they are."""

    type: str | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    merges: msgspec.Raw = msgspec.Raw(b"[]")


def load_backend(folder: Path, settings: dict[str, Any]) -> tuple[Backend, bytes]:
    """
    Args:
        settings: tokenizer_config.json.

    Returns:
        the library's tokenizer, and the tokenizer.json that it was made of.

    Raises:
        ModelLoadError: no tokenizer, or one that cannot be read.
    """
    path = folder / _FILE
    check_file(path)
    if not path.is_file():
        backend = _convert(folder)
        return backend, backend.to_str().encode()
    text = path.read_bytes()
    kind = declared(settings, read_json(folder / "config.json"), text)
    try:
        found = msgspec.json.decode(text, type=_Definition)
        model = msgspec.json.decode(found.model, type=_Model)
        if model.type not in (None, "BPE"):
            kind = None
        if kind is not None:
            text = _with_rules(text, model, kind, settings, "added_tokens_decoder" in settings)
            found = msgspec.json.decode(text, type=_Definition)
        with no_panics("tokenizers"):
            backend = Backend.from_buffer(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{_FILE} cannot be read: {error}") from error
    files = TokenFiles(
        settings=default_names(kind) | settings,
        special=read_json(folder / "special_tokens_map.json"),
        added=read_json(folder / "added_tokens.json"),
        stored=found.added_tokens,
    )
    add_tokens(backend, files)
    return backend, text


def _with_rules(text: bytes, model: _Model, kind: Declared, settings: dict[str, Any], listed: bool) -> bytes:
    """tokenizer.json with a declared class's rules, without added tokens if tokenizer_config.json lists them."""
    whole = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    bpe = {
        "type": "BPE", "unk_token": unknown_token(kind, settings), "fuse_unk": True, "byte_fallback": True,
        "vocab": model.vocab, "merges": model.merges,
    }  # fmt: skip
    changed: dict[str, Any] = whole | declared_rules(kind, settings) | {"model": bpe}
    return msgspec.json.encode(changed | ({"added_tokens": []} if listed else {}))


def add_tokens(backend: Backend, files: TokenFiles) -> None:
    """Add what the files name beside the vocabulary.

    Raises:
        ModelLoadError: a token would get another id than `added_tokens_decoder` or added_tokens.json gives it.
    """
    before: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    added = tokens_to_add(files, backend.get_added_tokens_decoder())
    backend.add_tokens([token for token in added if token.content])
    for number, token in files.by_number().items():
        place = backend.token_to_id(token.content)
        if token.content not in before and place is not None and place != number:
            name = "tokenizer_config.json" if "added_tokens_decoder" in files.settings else "added_tokens.json"
            raise ModelLoadError(
                f"{name}: added token {token.content[:80]!r} has the id {number}, but its place is {place}"
            )


def _convert(folder: Path) -> Backend:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelLoadError(
            "the model folder has no tokenizer.json",
            hint="install `transformers`, which can convert older tokenizer files, or add tokenizer.json",
        ) from error
    check_for_tokenizers(folder)
    try:
        backend = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False).backend_tokenizer
    except Exception as error:  # the conversion of a stranger's files may fail in any way
        raise ModelLoadError(
            f"the model folder has no tokenizer.json and its tokenizer cannot be converted: "
            f"{str(error).replace(str(folder), folder.name)}",
            hint="add tokenizer.json to the folder",
        ) from error
    if not isinstance(backend, Backend):
        raise ModelLoadError("the model folder has no tokenizer.json and its tokenizer has no fast form")
    return backend
