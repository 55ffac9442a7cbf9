"""The token ids of a prompt with images: a placeholder of the template becomes the places of an image's embeddings.

A placeholder counts only where the chat template wrote it. The media token in a text of the caller is broken before the
template is rendered, and its pieces are tokenized apart, so that it stays the plain text that it is.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from troupellm.actors.input.tokenize import check_length, rendered, too_long
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.media.description import MediaModel
from troupellm.models.tokenizer.tokenizer import Tokenizer, TooManyTokens
from troupellm.protocol.config.kv_hints import PrefixLease
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt, Prompt, TokensPrompt
from troupellm.protocol.messages.media import MediaItem, MediaSpan

Render = Callable[[ChatPrompt, list[dict[str, Any]]], str]
_NUMBER = "number"
"""Key of an image part: which of the prompt's images it is."""


class MediaPrompts:
    """Immutable and thread-safe."""

    def __init__(self, model: MediaModel, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ModelLoadError: (as InvalidRequest when used) the tokenizer does not have the media token.
        """
        self._model, self._tokenizer = model, tokenizer
        self.token = next((text for text, number in tokenizer.added_tokens.items() if number == model.token_id), "")
        """Text of the media token; empty where the tokenizer has none of its id."""

    def broken(self, prompt: ChatPrompt, mark: str) -> ChatPrompt:
        """The prompt with a mark inside of each media token that its texts have, or begin at their ends."""
        messages = [_mapped(message, self.token, mark) for message in prompt.messages]
        tools = None if prompt.tools is None else [_mapped(tool, self.token, mark) for tool in prompt.tools]
        documents = prompt.documents
        if documents is not None:
            documents = [_mapped(document, self.token, mark) for document in documents]
        kwargs = None if prompt.template_kwargs is None else _mapped(prompt.template_kwargs, self.token, mark)
        return msgspec.structs.replace(
            prompt, messages=messages, tools=tools, documents=documents, template_kwargs=kwargs
        )

    def tokenize(self, prompt: ChatPrompt, render: Render, most: int | None) -> TokensPrompt:
        """Render and tokenize a prompt whose images are prepared.

        Args:
            render: writes the prompt's text, and adds the messages to a list in the order in which they are shown.
            most: tokens of the context; the text is refused where it cannot fit.

        Raises:
            InvalidRequest: the template does not show each image once, or refuses the messages.
        """
        if not self.token:
            raise InvalidRequest("the tokenizer has no token that stands for an image", param="messages")
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        numbered = self._numbered(self.broken(prompt, mark))
        seen: list[dict[str, Any]] = []
        text = render(numbered, seen)
        if text.count(self.token) != len(prompt.items):  # the template does not read parts of type image
            numbered, seen = self._spelled(numbered), []
            text = render(numbered, seen)
        check_length("messages", text, self._tokenizer, most)
        shown = text.count(self.token)
        if shown != len(prompt.items):
            raise InvalidRequest(
                f"the chat template shows {shown} of {len(prompt.items)} images; put each into a message of the user",
                param="messages",
            )
        order = _numbers(seen)
        items = [prompt.items[number] for number in order] if len(order) == shown else prompt.items
        ids: list[int] = []
        for piece in text.split(mark):
            ids += self._tokenizer.encode(piece, add_special_tokens=False, most=most)
        if ids.count(self._model.token_id) != len(items):
            raise InvalidRequest("the tokenizer reads a placeholder of an image as other tokens", param="messages")
        return self._expanded(ids, items)

    @staticmethod
    def _numbered(prompt: ChatPrompt) -> ChatPrompt:
        """The prompt, whose image parts have their numbers: templates may want the messages in another order."""
        numbers = count()
        return _with_images(prompt, lambda part: {**part, _NUMBER: next(numbers)})

    def _spelled(self, prompt: ChatPrompt) -> ChatPrompt:
        """The prompt with texts for its image parts: for templates that read texts alone."""
        return _with_images(prompt, lambda part: {"type": "text", "text": self.token, _NUMBER: part[_NUMBER]})

    def _expanded(self, ids: Sequence[int], items: Sequence[MediaItem]) -> TokensPrompt:
        """The ids with the places of each item's embeddings for its placeholder."""
        token, found, spans = self._model.token_id, list[int](), list[MediaSpan]()
        left = iter(items)
        for number in ids:
            if number != token:
                found.append(number)
                continue
            item, first = next(left), 0
            for piece in self._model.family.pieces(item):
                if isinstance(piece, str):
                    found += self._tokenizer.encode(piece, add_special_tokens=False)
                else:
                    spans.append(MediaSpan(len(found), piece, item.digest, first))
                    found += [token] * piece
                    first += piece
        return TokensPrompt(found, media=tuple(spans))


def media_tokens(
    media: MediaPrompts | None, prompt: ChatPrompt, template: ChatTemplate, longest: int | None
) -> TokensPrompt:
    """The token ids of a chat with images. Slow for long texts.

    Args:
        media: None where the engine takes no images.
        longest: tokens of the context.

    Raises:
        InvalidRequest: as `MediaPrompts.tokenize`, or images are not taken or not prepared here.
    """
    if prompt.media or media is None:
        raise InvalidRequest("images are taken by an engine in the server's own process alone", param="messages")
    if prompt.truncation is not None:
        text = "a prompt with images is not cut; leave truncate_prompt_tokens out"
        raise InvalidRequest(text, param="truncate_prompt_tokens")
    try:
        tokens = media.tokenize(prompt, lambda given, seen: rendered(given, template, seen), longest)
    except TooManyTokens as error:
        assert longest is not None
        raise too_long("messages", longest, error.num_tokens, "has") from None
    leases = tuple(PrefixLease(len(tokens.token_ids), mark.seconds) for mark in prompt.cache_marks)
    return msgspec.structs.replace(tokens, leases=leases)


def items_of(prompt: Prompt) -> tuple[MediaItem, ...]:
    """The prepared images of a prompt, each once."""
    if not isinstance(prompt, ChatPrompt) or not prompt.items:
        return ()
    return tuple({item.digest: item for item in prompt.items}.values())


def _with_images(prompt: ChatPrompt, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> ChatPrompt:
    """The prompt, its image parts changed in their order."""

    def changed(message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [change(part) if _is_image(part) else part for part in content]}

    return msgspec.structs.replace(prompt, messages=[changed(message) for message in prompt.messages])


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _numbers(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the images in messages."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part[_NUMBER] for part in parts if isinstance(part, Mapping) and _NUMBER in part]


def _mapped(value: Any, token: str, mark: str) -> Any:
    """Plain data with a mark inside of each token in its texts and names."""
    if isinstance(value, str):
        return _broken(value, token, mark)
    if isinstance(value, Mapping):
        return {_named(name, token, mark): _mapped(inner, token, mark) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, token, mark) for inner in value]
    return value


def _named(name: Any, token: str, mark: str) -> Any:
    """A name of plain data: templates write tools and arguments with theirs."""
    return name.replace(token, f"{token[0]}{mark}{token[1:]}") if isinstance(name, str) else name


def _broken(text: str, token: str, mark: str) -> str:
    """The mark stands behind the first letter of each token, also of one that the next text could complete."""
    text = text.replace(token, f"{token[0]}{mark}{token[1:]}")
    for length in range(min(len(token) - 1, len(text)), 0, -1):
        if text.endswith(token[:length]):
            begin = len(text) - length + 1
            return f"{text[:begin]}{mark}{text[begin:]}"
    return text
