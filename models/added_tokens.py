"""The ids of added tokens. The library counts on from the vocabulary, whatever tokenizer.json says, and only warns: a
file whose ids are others would be served with every prompt read wrongly."""

from collections.abc import Mapping, Sequence

import msgspec

from troupellm.protocol.errors import ModelLoadError

_SHOWN = 80


class AddedToken(msgspec.Struct):
    """The part of an entry of `added_tokens` that is read here."""

    id: int
    content: str


def check_added(tokens: Sequence[AddedToken], vocabulary: Mapping[str, int]) -> None:
    """
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
