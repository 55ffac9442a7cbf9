"""`cache_control`: which blocks have a mark, what is refused, and where a mark is in the rendered prompt."""

from itertools import product

import msgspec
import pytest

from troupellm.actors.input.tokenize import leases_of
from troupellm.protocol.api.anthropic import MessagesRequest
from troupellm.protocol.api.chat import ChatMessage
from troupellm.protocol.config.kv_hints import CacheMark, PrefixLease
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.openai.cache_marks import marks_of_chat, marks_of_message

FIVE, HOUR = {"cache_control": {"type": "ephemeral"}}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(words: str, mark: dict | None = None) -> dict:
    return {"type": "text", "text": words} | (mark or {})


def message(role: str, *blocks: dict) -> dict:
    return {"role": role, "content": list(blocks)}


def marks(messages: list[dict], *, last: bool = False, **fields: object) -> tuple[CacheMark, ...]:
    body = {"max_tokens": 1, "messages": messages} | fields
    return marks_of_message(msgspec.convert(body, MessagesRequest), last=last)


def letters(given: str, *, add_special_tokens: bool) -> int:
    """A tokenizer with a token per character."""
    return len(given)


def test_marks_come_in_the_order_of_the_prompt() -> None:
    tool = {"name": "read", "description": 'Reads "a file" as it is. ', "input_schema": {}} | HOUR
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("one"), text("two")]} | FIVE
    found = marks(
        [message("user", text("Hello", FIVE)), message("user", result)], tools=[tool], system=[text("You code.", HOUR)]
    )
    assert found == (
        CacheMark("as it is.", 3600.0),
        CacheMark("You code.", 3600.0),
        CacheMark("Hello", 300.0),
        CacheMark("two", 300.0),
    )


def test_the_requests_own_mark_is_the_whole_prompt() -> None:
    assert marks([message("user", text("Hi"))], cache_control={"type": "ephemeral"}) == (CacheMark("", 300.0),)


def test_parts_of_chats_have_marks_too() -> None:
    given = [ChatMessage(role="user", content=[text("a"), text("b", HOUR)]), ChatMessage(role="user", content="c")]
    assert marks_of_chat(given) == (CacheMark("b", 3600.0),)


@pytest.mark.parametrize(
    ("blocks", "param"),
    [
        ([text("a", FIVE)] * 5, "cache_control"),
        ([text("a", {"cache_control": {"ttl": "2h"}})], "messages[0].content[0].cache_control.ttl"),
        ([text("a", {"cache_control": {"ttl": ["1h"]}})], "messages[0].content[0].cache_control.ttl"),
        ([text("a", {"cache_control": "1h"})], "messages[0].content[0].cache_control"),
    ],
)
def test_too_many_marks_and_unknown_times_are_refused_by_name(blocks: list[dict], param: str) -> None:
    for read in (
        lambda: marks([message("user", *blocks)]),
        lambda: marks_of_chat([ChatMessage(role="user", content=blocks)]),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read()
        assert caught.value.param == param


def test_of_a_threads_marks_the_last_ones_count() -> None:
    found = marks([message("user", *(text(str(number), FIVE) for number in range(6)))], last=True)
    assert [mark.text for mark in found] == ["2", "3", "4", "5"]


def test_a_mark_leases_the_tokens_up_to_its_text() -> None:
    prompt = "<s>You code.</s><u>ok</u><u>ok</u><a>"
    found = leases_of((CacheMark("You code.", 1.0), CacheMark("ok", 2.0)), prompt, len(prompt), letters)
    assert found == (PrefixLease(len("<s>You code."), 1.0), PrefixLease(len(prompt) - len("</u><a>"), 2.0))


def test_of_equal_texts_each_mark_has_its_own() -> None:
    prompt = "<u>ok</u><u>ok</u>"
    found = leases_of((CacheMark("ok", 1.0), CacheMark("ok", 1.0)), prompt, len(prompt), letters)
    assert [lease.tokens for lease in found] == [5, 14]


def test_a_mark_that_the_template_did_not_render_leases_the_whole_prompt() -> None:
    assert leases_of((CacheMark("elsewhere", 1.0), CacheMark("", 2.0)), "prompt", 6, letters) == (
        PrefixLease(6, 1.0),
        PrefixLease(6, 2.0),
    )


def test_far_from_the_end_a_place_is_an_estimate() -> None:
    prompt = "system" + 10_000 * "x"
    (lease,) = leases_of((CacheMark("system", 1.0),), prompt, len(prompt) // 2, letters)
    assert lease.tokens == 3


class ForwardText(str):
    """A text that is searched forward only: CPython's rfind takes the product of both lengths."""

    def rfind(self, *_: object) -> int:
        raise AssertionError("a slow search")


def test_a_mark_is_searched_for_in_linear_time_and_is_found_where_it_stands_last() -> None:
    words = ["".join(word) for size in (1, 2, 3) for word in product("ab", repeat=size)]
    prompt = "aababbbaabab"
    for first, second in product(words, words):
        before = prompt.rfind(second)
        places = [prompt.rfind(first, 0, before if before >= 0 else len(prompt)), before]
        expected = [
            place + len(word) if place >= 0 else len(prompt)
            for place, word in zip(places, (first, second), strict=True)
        ]
        marked = (CacheMark(first, 1.0), CacheMark(second, 1.0))
        found = leases_of(marked, ForwardText(prompt), len(prompt), letters)
        assert [lease.tokens for lease in found] == expected
