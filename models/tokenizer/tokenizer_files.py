"""The library's tokenizer of a model folder: from tokenizer.json and the files beside it, or else from an older format.

The rules are those of transformers 5: tokenizer.json counts, but a declared LlamaTokenizer or GemmaTokenizer brings its
own normalization, and the files beside it add tokens. `add_bos_token` and `add_eos_token` count only without it.
"""

import codecs
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer as Backend, processors

from troupellm.models.config.model_documents import read_json
from troupellm.models.hub.errors import why
from troupellm.models.hub.json_file import LFS_POINTER, MOST_BYTES, lfs_pointer
from troupellm.models.hub.model_folder import check_file, check_for_tokenizers
from troupellm.models.processes.rust_panics import no_panics
from troupellm.models.tokenizer.added_tokens import TokenFiles, text_of, tokens_to_add
from troupellm.models.tokenizer.declared import Declared, declared, declared_rules, default_names, unknown_token
from troupellm.models.tokenizer.rank_files import tekken, tiktoken
from troupellm.models.tokenizer.sentencepiece_model import BPE, build, read_model, special_pieces
from troupellm.models.tokenizer.tokenizer_bombs import check_rules
from troupellm.protocol.errors import ModelLoadError

_FILE, _TEKKEN = "tokenizer.json", "tekken.json"


class Loaded(NamedTuple):
    """A tokenizer of a folder."""

    backend: Backend
    definition: bytes
    """The tokenizer.json that makes an equal one, but for tokens that other files add."""
    settings: dict[str, Any]
    """tokenizer_config.json, with the special tokens that another format names."""
    invented: frozenset[str] = frozenset()
    """Special tokens that are only named: they got new ids, which the model has never seen."""


class _Definition(msgspec.Struct):
    """tokenizer.json, as far as it is looked into here."""

    model: msgspec.Raw
    added_tokens: list[dict[str, Any]] = []


class _Model(msgspec.Struct):
    """A tokenizer's model; vocabulary and merges stay as they are."""

    type: str | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    merges: msgspec.Raw = msgspec.Raw(b"[]")


def load_backend(folder: Path, settings: dict[str, Any]) -> Loaded:
    """
    Args:
        settings: tokenizer_config.json.

    Raises:
        ModelLoadError: no tokenizer, or one that cannot be read.
    """
    path = folder / _FILE
    check_file(path)
    if not path.is_file():
        return _older(folder, settings)
    text = _content(path)
    kind = declared(settings, read_json(folder / "config.json"), text)
    try:
        found = msgspec.json.decode(text, type=_Definition)
        model = msgspec.json.decode(found.model, type=_Model)
        if model.type not in (None, "BPE"):
            kind = None
        if kind is not None:
            text = _with_rules(text, model, kind, settings, "added_tokens_decoder" in settings)
            found = msgspec.json.decode(text, type=_Definition)
        check_rules(text, _FILE)
        with no_panics("tokenizers"):
            backend = Backend.from_buffer(text)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{_FILE} cannot be read: {error}") from error
    files = TokenFiles(
        settings=default_names(kind) | settings,
        special=read_json(folder / "special_tokens_map.json"),
        added=read_json(folder / "added_tokens.json"),
        stored=found.added_tokens,
    )
    return Loaded(backend, text, settings, add_tokens(backend, files))


def _content(path: Path) -> bytes:
    """A tokenizer file without a byte order mark.

    Raises:
        ModelLoadError: it is a Git LFS pointer or too large, or cannot be read.
    """
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ModelLoadError(f"{path.name} has {size:,} bytes; tokenizers of at most {MOST_BYTES:,} are read")
        data = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read: {why(error)}") from error
    if data.startswith(LFS_POINTER):
        raise lfs_pointer(path.name)
    return data.removeprefix(codecs.BOM_UTF8)


def _with_rules(text: bytes, model: _Model, kind: Declared, settings: dict[str, Any], listed: bool) -> bytes:
    """tokenizer.json with a declared class's rules, without added tokens if tokenizer_config.json lists them."""
    whole = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    bpe = {
        "type": "BPE",
        "unk_token": unknown_token(kind, settings),
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": model.vocab,
        "merges": model.merges,
    }
    changed: dict[str, Any] = whole | declared_rules(kind, settings) | {"model": bpe}
    return msgspec.json.encode(changed | ({"added_tokens": []} if listed else {}))


def add_tokens(backend: Backend, files: TokenFiles) -> frozenset[str]:
    """Add the settings that the files have beside the vocabulary.

    Returns:
        tokens that got a new id, which no file gives them.

    Raises:
        ModelLoadError: a token would get another id than `added_tokens_decoder` or added_tokens.json gives it.
    """
    added = tokens_to_add(files, backend.get_added_tokens_decoder())
    numbered = files.by_number()
    texts = {token.content for token in (*added, *numbered.values())}
    before = {text for text in texts if backend.token_to_id(text) is not None}  # the whole vocabulary takes long
    backend.add_tokens([token for token in added if token.content])
    for number, token in numbered.items():
        place = backend.token_to_id(token.content)
        if token.content not in before and place is not None and place != number:
            name = "tokenizer_config.json" if "added_tokens_decoder" in files.settings else "added_tokens.json"
            raise ModelLoadError(
                f"{name}: added token {token.content[:80]!r} has the id {number}, but its place is {place}"
            )
    listed = {token.content for token in numbered.values()}
    return frozenset(token.content for token in added if token.content not in before and token.content not in listed)


def _older(folder: Path, settings: dict[str, Any]) -> Loaded:
    """A folder without tokenizer.json."""
    config, pieces = read_json(folder / "config.json"), None
    path = _vocabulary_file(folder)
    if path is None:
        backend = _convert(folder)
        return Loaded(backend, backend.to_str().encode(), settings)
    data = _content(path)
    try:
        with no_panics("tokenizers"):
            if path.name == _TEKKEN:
                backend = tekken(data)
                check_rules(backend.to_str().encode(), path.name)
                settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True} | settings
            elif data[:1] == b"\n":
                backend, settings, pieces = _sentencepiece(data, settings, config)
            else:
                backend = tiktoken(data, path.name, settings, config)
                settings = {"eos_token": _end_of(backend)} | settings
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path.name}: the tokenizer cannot be built: {error}") from error
    files = TokenFiles(
        settings=settings,
        special=read_json(folder / "special_tokens_map.json"),
        added=read_json(folder / "added_tokens.json"),
        pieces=pieces or (),
    )
    invented = add_tokens(backend, files)
    _add_ends(backend, settings)
    return Loaded(backend, backend.to_str().encode(), settings, invented)


def _vocabulary_file(folder: Path) -> Path | None:
    """The file of an older format that counts; all of them are checked before they are looked for."""
    for path in (folder / _TEKKEN, folder / "tokenizer.model", folder / "tiktoken.model"):
        check_file(path)
        if path.is_file():
            return path
    for path in sorted(folder.glob("*.tiktoken")):
        check_file(path)
        return path
    return None


def _sentencepiece(
    data: bytes, settings: dict[str, Any], config: dict[str, Any]
) -> tuple[Backend, dict[str, Any], list[AddedToken]]:
    """The tokenizer of a SentencePiece model, its settings and its special tokens."""
    model = read_model(data)
    kind = declared(settings, config, None)
    names = {
        key: model.pieces[index].text
        for key, index in (("bos_token", model.bos_id), ("eos_token", model.eos_id))
        if 0 <= index < len(model.pieces)
    }
    unknown = model.pieces[model.unknown_id].text
    backend = build(model, unknown if kind is None else unknown_token(kind, settings))
    if kind is not None and model.algorithm == BPE:
        rules = msgspec.json.encode(declared_rules(kind, settings))
        whole = msgspec.json.decode(backend.to_str().encode(), type=dict[str, msgspec.Raw])
        changed = whole | msgspec.json.decode(rules, type=dict[str, msgspec.Raw])
        backend = Backend.from_buffer(msgspec.json.encode(changed))
    unsaid = {"add_bos_token": "bos_token" in names} if not settings else {}
    return backend, names | {"unk_token": unknown} | unsaid | default_names(kind) | settings, special_pieces(model)


def _end_of(backend: Backend) -> str | None:
    """The end token of a tiktoken file whose folder names none."""
    return next((text for text in ("<|end_of_text|>", "<|endoftext|>", "[EOS]") if backend.token_to_id(text)), None)


def _add_ends(backend: Backend, settings: dict[str, Any]) -> None:
    """The tokens around a prompt that tokenizer_config.json asks for."""
    texts = [text_of(settings.get(key)) if settings.get(f"add_{key}") else None for key in ("bos_token", "eos_token")]
    ids = {text: backend.token_to_id(text) for text in texts if text is not None}
    if None in ids.values() or not ids:
        return
    before, after = ([text] if text else [] for text in texts)
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{text}:1" for text in before), "$B:1", *(f"{text}:1" for text in after)],
        special_tokens=[(text, number) for text, number in ids.items() if number is not None],
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
