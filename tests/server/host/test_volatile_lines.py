"""Lines of the system prompt that change: moved behind the user's newest text."""

import pytest

from troupellm.protocol.errors import ConfigError
from troupellm.server.host.volatile_lines import MAX_PATTERNS, VolatileLines


def lines(folder, text):
    path = folder / "lines.txt"
    path.write_text(text, encoding="utf-8")
    return VolatileLines.read(str(path))


def said(role, content):
    return {"role": role, "content": content}


def test_lines_move_behind_the_newest_text_of_the_user(tmp_path):
    moving = lines(tmp_path, "# lines that change\nToday is .*\n\n(Time|Zeit): \\d+:\\d+\n")
    system = "You code.\nToday is Monday.\nTime: 12:30\nToday is kept in the midst: Today is"
    messages = [said("system", system), said("user", "a"), said("assistant", "Today is b"), said("user", "c")]
    first, *middle, last = moving.moved(messages)
    assert first["content"] == "You code."
    assert middle == messages[1:3]
    assert last["content"] == "c\n\nToday is Monday.\nTime: 12:30\nToday is kept in the midst: Today is"
    assert messages[0]["content"] == system


def test_contents_of_parts_stay_parts(tmp_path):
    moving = lines(tmp_path, "Date: .*")
    parts = [{"type": "text", "text": "Rules.\nDate: 1"}]
    system, user = moving.moved([said("system", parts), said("user", [{"type": "text", "text": "a"}])])
    assert system["content"] == [{"type": "text", "text": "Rules."}]
    assert [part["text"] for part in user["content"]] == ["a", "Date: 1"]


@pytest.mark.parametrize(
    "messages",
    [
        [said("system", "Date: 1")],
        [said("user", "Date: 1")],
        [said("user", "a"), said("system", "Date: 1"), said("user", "b")],
    ],
)
def test_messages_without_volatile_lines_stay_as_they_are(tmp_path, messages):
    assert lines(tmp_path, "Date: .*").moved(messages) == messages
    assert VolatileLines.read(None) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [("(", "line 1"), ("a\n[", "line 2"), ("x\n" * (MAX_PATTERNS + 1), "got 65"), ("#" * 70_000, "65536 bytes")],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, text, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        lines(tmp_path, text)
    assert caught.value.param == "volatile_lines"


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("nothing", "bytes", "."):
        with pytest.raises(ConfigError, match="volatile_lines: cannot be read"):
            VolatileLines.read(str(tmp_path / name))


def test_without_expressions_no_message_is_looked_at():
    messages = [{}]
    assert VolatileLines(()).moved(messages) == messages
