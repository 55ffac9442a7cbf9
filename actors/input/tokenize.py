"""Turns a prompt in any of its forms into token ids. A prompt that cannot fit is refused before it is tokenized."""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from troupellm.models.chat_template.template import ChatTemplate, check_template_kwargs
from troupellm.models.tokenizer.tokenizer import Tokenizer, TooManyTokens
from troupellm.protocol.config.kv_hints import CacheMark, PrefixLease
from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest, context_sentence
from troupellm.protocol.messages.input import (
    ChatPrompt,
    EmbedsPrompt,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    Truncation,
)

_MOST_INT32 = 2**31 - 1
_HALF = re.compile("[\ud800-\udfff]")
"""Of a surrogate pair: a conversation that has one somewhere goes on without it."""
CUT_MARGIN = 64
"""Tokens beyond those that are kept whose text is tokenized too, so that the cut itself changes none that are kept."""


CutT = TypeVar("CutT", str, list[int], Sequence[int])


def tokenize(
    prompt: Prompt,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    most_tokens: int | None,
    answer_tokens: int = 0,
    *,
    with_borders: bool = False,
) -> TokensPrompt:
    """Render and tokenize. Slow for long texts: 0.8 ms for 1,000 characters.

    Args:
        most_tokens: a text that cannot fit into so many is refused before it is tokenized, or cut where its prompt
            says so; None takes any.
        answer_tokens: of `most_tokens`, what is left free by a prompt that is cut to what fits.
        with_borders: say where a chat's last turn begins and ends.

    Raises:
        InvalidRequest: no such template, messages that it refuses, text that is no Unicode, or much too long.
    """
    field = prompt_field(prompt)
    match prompt:
        case TokensPrompt(token_ids=token_ids, truncation=truncation, truncated=truncated):
            keep, given = kept_tokens(truncation, most_tokens, answer_tokens), len(token_ids)
            if keep is not None and truncation is not None:
                token_ids = _cut(token_ids, keep, truncation)
            if most_tokens is not None and len(token_ids) > most_tokens:
                raise too_long(field, most_tokens, len(token_ids), "has")
            kept = _checked_ids(token_ids)
            if truncated or len(kept) < given:
                return TokensPrompt(kept, truncated=True)
            return TokensPrompt(kept, leases=prompt.leases)
        case EmbedsPrompt(num_tokens=num_tokens):
            if most_tokens is not None and num_tokens > most_tokens:
                raise too_long(field, most_tokens, num_tokens, "has")
            return TokensPrompt([0] * num_tokens)
        case PairPrompt():
            raise InvalidRequest("two texts are for scoring, not for generating", param=field)
    text, add_special_tokens = _text(prompt, template)
    keep, letters = kept_tokens(prompt.truncation, most_tokens, answer_tokens), len(text)
    if keep is not None and prompt.truncation is not None:
        text = _cut(text, (keep + CUT_MARGIN) * tokenizer.longest_token, prompt.truncation)
    check_length(field, text, tokenizer, most_tokens, margin=0 if keep is None else CUT_MARGIN)
    if keep is None or prompt.truncation is None:
        try:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, most=most_tokens)
            if not isinstance(prompt, ChatPrompt):
                return TokensPrompt(ids)
            marks, count = prompt.cache_marks, tokenizer.count
            return TokensPrompt(
                ids,
                leases=leases_of(marks, text, len(ids), count) if marks else (),
                borders=last_turn(prompt.messages, text, len(ids), count) if with_borders else (),
            )
        except TooManyTokens as error:
            assert most_tokens is not None
            raise too_long(field, most_tokens, error.num_tokens, "has") from None
    whole = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    kept = _cut_tokens(whole, text, tokenizer, keep, prompt.truncation, add_special_tokens=add_special_tokens)
    return TokensPrompt(kept, truncated=len(kept) < len(whole) or len(text) < letters)


def count_tokens(
    prompt: TextPrompt | ChatPrompt, tokenizer: Tokenizer, template: ChatTemplate, most_tokens: int | None
) -> int:
    """How many tokens the whole prompt has. Slow for long texts, and makes no list of them.

    Args:
        most_tokens: a text that cannot fit into so many is refused before it is tokenized; None takes any.

    Raises:
        InvalidRequest: no such template, messages that it refuses, text that is no Unicode, or much too long.
    """
    text, add_special_tokens = _text(prompt, template)
    check_length(prompt_field(prompt), text, tokenizer, most_tokens)
    return tokenizer.count(text, add_special_tokens=add_special_tokens)


def _text(prompt: TextPrompt | ChatPrompt, template: ChatTemplate) -> tuple[str, bool]:
    """The text to tokenize, and whether special tokens go around it."""
    if isinstance(prompt, ChatPrompt):
        if prompt.media:
            raise InvalidRequest("the tokens of images are not counted yet", param="messages")
        return rendered(prompt, template), False
    if not isinstance(prompt.text, str):
        raise InvalidRequest("prompt must be text", param=prompt_field(prompt), code="invalid_type")
    return prompt.text, prompt.add_special_tokens


def rendered(prompt: ChatPrompt, template: ChatTemplate, shown: list[dict[str, Any]] | None = None) -> str:
    """The text of a chat, as Unicode has it.

    Args:
        shown: as of `ChatTemplate.render`.

    Raises:
        InvalidRequest: no such template, or messages that it refuses.
    """
    return _without_halves(_render(prompt, template, shown))


def _without_halves(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF.sub("\ufffd", text)
    return text


def check_length(field: str, text: str, tokenizer: Tokenizer, most_tokens: int | None, margin: int = 0) -> None:
    """
    Args:
        slack: tokens beyond `most_tokens` that are cut off later.

    Raises:
        InvalidRequest: text that is no Unicode, or too long for so many tokens, however few of them it needs.
    """
    if most_tokens is not None and len(text) > (most_tokens + margin) * tokenizer.longest_token:
        raise too_long(field, most_tokens, len(text) // tokenizer.longest_token, "has at least")
    check_unicode(field, text)


def prompt_field(prompt: Prompt) -> str:
    """The request field that errors about this prompt name."""
    if isinstance(prompt, EmbedsPrompt):
        return "prompt_embeds"
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def check_unicode(field: str, text: str) -> None:
    """Raises InvalidRequest for half of a surrogate pair, which has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} has half of a surrogate pair at character {error.start}", param=field) from None


def too_long(field: str, limit: int, got: int, has: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{context_sentence(limit)} However, the {field} {has} {got} tokens. Please reduce the length of the {field}.",
        limit=limit,
        got=got,
        param=field,
    )


def kept_tokens(truncation: Truncation | None, most_tokens: int | None, answer_tokens: int) -> int | None:
    """How many tokens a prompt that may be cut keeps; None when all."""
    if truncation is None:
        return None
    if truncation.tokens >= 0:
        return truncation.tokens
    return None if most_tokens is None else max(1, most_tokens - answer_tokens)


def _cut(value: CutT, keep: int, truncation: Truncation) -> CutT:
    if len(value) <= keep:
        return value
    return value[len(value) - keep :] if truncation.side == "left" else value[:keep]


def _cut_tokens(
    whole: list[int], text: str, tokenizer: Tokenizer, keep: int, truncation: Truncation, *, add_special_tokens: bool
) -> list[int]:
    """At most `keep` of a text's tokens; those that the tokenizer puts around every text stay."""
    if len(whole) <= keep or not add_special_tokens:
        return _cut(whole, keep, truncation)
    plain = tokenizer.encode(text, add_special_tokens=False)
    around = len(whole) - len(plain)
    if around >= keep:
        return _cut(whole, keep, truncation)
    before = next((place for place in range(around + 1) if whole[place : place + len(plain)] == plain), 0)
    return whole[:before] + _cut(plain, keep - around, truncation) + whole[before + len(plain) :]


def _render(prompt: ChatPrompt, template: ChatTemplate, shown: list[dict[str, Any]] | None = None) -> str:
    kwargs = dict(prompt.template_kwargs or {})
    check_template_kwargs(kwargs)  # before one of them can collide with an argument below
    return template.render(
        prompt.messages,
        prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        documents=prompt.documents,
        source=prompt.template,
        shown=shown,
        **kwargs,
    )


def _checked_ids(token_ids: Sequence[int]) -> list[int]:
    """Token ids as plain integers. Their range is checked against the model later."""
    try:
        return array("q", token_ids).tolist()
    except (TypeError, OverflowError):
        raise InvalidRequest(
            f"prompt must be text or a list of token ids in [0, {_MOST_INT32}]", param="prompt", code="invalid_type"
        ) from None


_COUNTED_LETTERS = 4096
"""Text behind a mark that is tokenized to find the mark's token. With more of it the place is an estimate."""


def leases_of(
    marks: Sequence[CacheMark], text: str, num_tokens: int, count: Callable[..., int]
) -> tuple[PrefixLease, ...]:
    """A mark whose text the template did not render leases the whole prompt: a lease too long costs an answer nothing.

    Args:
        marks: in the order of the prompt.
        text: the rendered prompt.
        num_tokens: of the whole prompt.
        count: tells how many tokens a text has.
    """
    leases: list[PrefixLease] = []
    backward = text[::-1] if marks else ""
    searched = 0
    for mark in reversed(marks):
        # CPython's find takes linear time, and its rfind the product of both lengths.
        behind = backward.find(mark.text[::-1], searched) if mark.text else -1
        if behind < 0:
            leases.append(PrefixLease(num_tokens, mark.seconds))
            continue
        end = len(text) - behind
        searched = behind + len(mark.text)
        leases.append(PrefixLease(_tokens_before(end, text, num_tokens, count), mark.seconds))
    return tuple(reversed(leases))


def last_turn(
    messages: Sequence[Mapping[str, Any]], text: str, num_tokens: int, count: Callable[..., int]
) -> tuple[int, ...]:
    """How many tokens come before the text of a chat's last message, and before what is behind it.

    Empty where the template did not render that text as it is.

    Args:
        text, num_tokens, count: as of `leases_of`.
    """
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = next((part for part in texts if isinstance(part, str)), None)
    if not isinstance(content, str) or not content.strip():
        return ()
    behind = text[::-1].find(content.strip()[::-1])
    if behind < 0:
        return ()
    end = len(text) - behind
    return tuple(_tokens_before(place, text, num_tokens, count) for place in (end - len(content.strip()), end))


def _tokens_before(place: int, text: str, num_tokens: int, count: Callable[..., int]) -> int:
    """How many tokens of a text come before a place in it: an estimate where much comes behind it."""
    if place == len(text):
        return num_tokens
    if len(text) - place > _COUNTED_LETTERS:
        return num_tokens * place // len(text)
    return max(0, num_tokens - count(text[place:], add_special_tokens=False))
