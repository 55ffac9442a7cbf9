"""Where a chat's last turn begins and ends, by tokens."""

import pytest

from troupellm.actors.input.tokenize import last_turn


def count(text: str, *, add_special_tokens: bool) -> int:
    """One token per letter."""
    assert not add_special_tokens
    return len(text)


def turn(*contents: object, text: str) -> tuple[int, ...]:
    return last_turn([{"role": "user", "content": content} for content in contents], text, len(text), count)


def test_the_places_before_and_behind_the_last_message() -> None:
    assert turn("hello", text="[user]hello[assistant]") == (6, 11)
    assert turn("hello", "again", text="[u]hello[u]again") == (11, 16)


def test_the_last_one_of_equal_texts_counts() -> None:
    assert turn("yes", "yes", text="[u]yes[u]yes[a]") == (9, 12)


def test_a_template_may_strip_the_text() -> None:
    assert turn("  hello \n", text="[u]hello[a]") == (3, 8)


def test_the_first_text_of_parts_is_looked_for() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert turn(parts, text="[u]onetwo[a]") == (3, 6)


def test_a_long_turn_begins_about_there() -> None:
    text = "[u]" + "word " * 2000 + "[a]"
    begin, end = turn("word " * 2000, text=text)
    assert 0 <= begin <= 3
    assert end == len(text) - 4


@pytest.mark.parametrize("content", ["", "   ", None, 7, [], [{"type": "image"}], "unseen"])
def test_a_text_that_is_not_shown_has_no_place(content: object) -> None:
    assert turn(content, text="[u]hello[a]") == ()


def test_a_chat_without_messages_has_no_place() -> None:
    assert turn(text="[u]hello[a]") == ()
