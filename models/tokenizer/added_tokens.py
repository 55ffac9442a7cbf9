"""Collects the added tokens of the files beside tokenizer.json, and checks that each has the id that its file states.

The rules are those of transformers 5 (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend.__init__`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import AddedToken as LibraryToken

from troupellm.protocol.errors import ModelLoadError

_SHOWN = 80
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class AddedToken(msgspec.Struct):
    """The part of an entry of `added_tokens` in tokenizer.json that is checked here."""

    id: int
    content: str


class TokenFiles(msgspec.Struct):
    """The tokens that a folder declares beside its vocabulary; each is empty if its file is missing."""

    settings: dict[str, Any]
    """tokenizer_config.json."""
    special: dict[str, Any] = msgspec.field(default_factory=dict)
    """special_tokens_map.json."""
    added: dict[str, Any] = msgspec.field(default_factory=dict)
    """added_tokens.json: ids by text."""
    stored: Sequence[dict[str, Any]] = ()
    """`added_tokens` of tokenizer.json."""
    pieces: Sequence[LibraryToken] = ()
    """Control and user-defined pieces of a SentencePiece model, special tokens of other files."""

    def by_number(self) -> dict[int, LibraryToken]:
        """The tokens that have an id, by it: `added_tokens_decoder`, or else added_tokens.json and tokenizer.json.

        Raises:
            ModelLoadError: an entry that is no token.
        """
        listed = self.settings.get("added_tokens_decoder")
        if listed is not None:
            return dict(_numbered(listed))
        named = self.named()
        special = {text_of(named.get(key)) for key in _NAMED} | {*map(text_of, self._extra())}
        found: dict[int, LibraryToken] = {}
        for text, number in self.added.items():
            if isinstance(number, bool) or not isinstance(number, int):
                raise ModelLoadError(f"added_tokens.json: {text[:_SHOWN]!r} must have a token id, got {number!r:.80}")
            found[number] = LibraryToken(text, normalized=text not in special, special=text in special)
        for entry in self.stored:
            found[entry["id"]] = _token(entry, "tokenizer.json")
        return found

    def named(self) -> dict[str, Any]:
        """The special tokens that have a name, as written: those of every model first, then a model's own."""
        values = dict(self.settings)
        if "added_tokens_decoder" not in self.settings:
            values |= {key: value for key, value in self.special.items() if key not in _LISTS}
        own = [key for key in values if key.endswith("_token") and key not in _NAMED]
        found = {key: values[key] for key in (*_NAMED, *own) if text_of(values.get(key))}
        further = self._listed()
        return found | (further if isinstance(further, dict) else {})

    def _listed(self) -> Any:
        for key in _LISTS:
            if self.settings.get(key):
                return self.settings[key]
        if "added_tokens_decoder" in self.settings:
            return ()
        return next((self.special[key] for key in _LISTS if self.special.get(key)), ())

    def _extra(self) -> list[Any]:
        """Special tokens without a name."""
        listed = self._listed()
        return [*(listed if isinstance(listed, list) else ()), *self.pieces]


def tokens_to_add(files: TokenFiles, present: Mapping[int, LibraryToken]) -> list[LibraryToken]:
    """The additions to a tokenizer, in this order: tokens with an id that it lacks or has with other flags, special
    tokens with a name, and further special tokens.

    Args:
        present: the tokenizer's added tokens by id.
    """
    known = {repr(token) for token in present.values()}
    numbered = files.by_number()
    by_text = {token.content: token for token in numbered.values()}
    found = [token for _, token in sorted(numbered.items()) if repr(token) not in known]
    texts = {token.content for token in (*present.values(), *found)}
    named = files.named().values()
    names = {text_of(value) for value in named}
    for value in (*named, *files._extra()):
        text = text_of(value)
        if text and text not in texts:
            texts.add(text)
            found.append(by_text.get(text) or _special(value))
    return [_as_special(token) if token.content in names else token for token in found]


def text_of(value: Any) -> str | None:
    """A special token's text: a string, or an object with `content`."""
    if isinstance(value, LibraryToken):
        return str(value.content)
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _numbered(listed: Any) -> Iterable[tuple[int, LibraryToken]]:
    file = "tokenizer_config.json"
    if not isinstance(listed, dict):
        raise ModelLoadError(f"{file}: added_tokens_decoder must be an object of tokens by id")
    for key, entry in listed.items():
        if not key.isdecimal() or text_of(entry) is None or not isinstance(entry, dict):
            raise ModelLoadError(f"{file}: added_tokens_decoder[{key[:_SHOWN]!r}] must be a token, got {entry!r:.80}")
        yield int(key), _token(entry, file)


def _token(entry: Mapping[str, Any], file: str) -> LibraryToken:
    flags = {name: entry[name] for name in (*_FLAGS, "special") if entry.get(name) is not None}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ModelLoadError(f"{file}: the flags of token {entry['content'][:_SHOWN]!r} must be true or false")
    return LibraryToken(entry["content"], **flags)


def _special(value: Any) -> LibraryToken:
    if isinstance(value, LibraryToken):
        return value
    return _token((value if isinstance(value, dict) else {"content": value}) | {"special": True}, "special tokens")


def _as_special(token: LibraryToken) -> LibraryToken:
    if token.special:
        return token
    return LibraryToken(token.content, special=True, **{name: getattr(token, name) for name in _FLAGS})


def check_added(tokens: Sequence[AddedToken], vocabulary: Mapping[str, int]) -> None:
    """The library counts on from the vocabulary, even if tokenizer.json says otherwise, and only warns: a file with
    other ids would be served with every prompt read wrongly.

    Args:
        tokens: as the file has them.
        vocabulary: every token's id as the library has it, added ones among them.

    Raises:
        ModelLoadError: an added token has the id of another token, or one that is not its place; names token and id.
    """
    places = {token.id: token.content for token in tokens}
    for token in tokens:
        place = vocabulary.get(token.content)  # none: an empty token, which is never found in a text
        if place is not None and place != token.id:
            raise _refused(token, _owner(token, vocabulary) or places[token.id], place)
    for text, number in vocabulary.items():
        if places.get(number, text) != text:
            raise _refused(AddedToken(number, places[number]), text, number)


def _owner(token: AddedToken, vocabulary: Mapping[str, int]) -> str | None:
    return next((text for text, number in vocabulary.items() if number == token.id and text != token.content), None)


def _refused(token: AddedToken, owner: str, place: int) -> ModelLoadError:
    text = f"tokenizer.json: added token {token.content[:_SHOWN]!r} has the id {token.id}, which is "
    if owner != token.content:
        return ModelLoadError(f"{text}that of token {owner[:_SHOWN]!r}")
    return ModelLoadError(f"{text}not its place in the vocabulary: that is {place}")
