"""Skipped settings are reported to the client every time, and to the log once."""

import logging

import pytest

from troupellm.server.base.skipped import HEADER, MAX_NAMED, MAX_REMEMBERED, Skipped, skipped_names

pytestmark = pytest.mark.anyio


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, logger="troupellm.server")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def told(make_wire, make_exchange):
    """The header of the answer to a request with such tools; None without one."""

    def ask(skipped, kinds):
        exchange = make_exchange(make_wire())
        skipped.report(exchange, skipped_names("tool", kinds))
        headers = [value for name, value in exchange.further_headers if name == HEADER]
        assert len(headers) <= 1
        return headers[0].decode() if headers else None

    return ask


async def test_each_answer_tells_of_it_and_the_log_once(told, logged):
    skipped = Skipped()
    for _ in range(3):
        assert told(skipped, ["web_search", "custom", "web_search"]) == "tool web_search, tool custom"
    assert [line.split(",")[0] for line in logged()] == [
        "requests have the tool web_search",
        "requests have the tool custom",
    ]


async def test_nothing_skipped_is_nothing_told(told, logged):
    assert told(Skipped(), []) is None
    assert logged() == []


async def test_a_report_of_skipped_settings_keeps_other_headers(make_wire, make_exchange):
    exchange = make_exchange(make_wire())
    exchange.further_headers = ((b"vary", b"origin"),)
    Skipped().report(exchange, ["item compaction"])
    assert exchange.further_headers == ((b"vary", b"origin"), (HEADER, b"item compaction"))


async def test_types_cannot_forge_a_header_or_a_line(told, logged):
    told_of = told(Skipped(), ["a\r\nset-cookie: b", "\u00e9, x", "y" * 10_000, ""])
    assert told_of == f"tool a??set-cookie??b, tool ???x, tool {'y' * 64}, tool ?"
    assert logged() == []


async def test_skipped_kinds_told_and_remembered_are_bounded(told, logged):
    skipped = Skipped()
    kinds = [f"kind_{number}" for number in range(10 * MAX_REMEMBERED)]
    named = told(skipped, kinds)
    assert named.split(", ")[:MAX_NAMED] == [f"tool {kind}" for kind in kinds[:MAX_NAMED]]
    assert named.endswith(f", {len(kinds) - MAX_NAMED} more")
    for kind in kinds:
        told(skipped, [kind])
    assert len(logged()) == MAX_REMEMBERED
