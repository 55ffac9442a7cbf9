"""Log lines of other packages: one short line each, by the queue of all."""

import logging

import pytest

from troupellm.server.observe.logs import LONGEST_BRIEF, BriefFormatter


def record(text: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    raised = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("asyncio", logging.ERROR, "file.py", 1, text, arguments, raised)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (record("plain"), "ERROR plain"),
        (record("two\nlines\r\n\tand %s", "more"), "ERROR two lines and more"),
        (record("too %s few"), "ERROR too %s few"),
        (record("%d", "no number"), "ERROR %d (TypeError)"),
        (record("it broke", error=OSError(107, "not connected")), "ERROR it broke: OSError: [Errno 107] not connected"),
        (
            record("group", error=ExceptionGroup("all", [ExceptionGroup("some", [ValueError("one\ntwo")])])),
            "ERROR group: ValueError: one two",
        ),
        (record("x" * 10 * LONGEST_BRIEF), "ERROR " + "x" * LONGEST_BRIEF),
    ],
)
def test_records_of_other_packages_take_one_short_line(given: logging.LogRecord, line: str) -> None:
    assert BriefFormatter(logging.Formatter("%(levelname)s %(message)s")).format(given) == line
