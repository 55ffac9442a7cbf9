"""Processes of ours, for real."""

import os

import pytest

from troupellm.actors.processes import SystemProcesses

pytestmark = pytest.mark.anyio


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def received(self, data: bytes) -> None: ...

    def closed(self) -> None: ...

    def said(self, line: str) -> None:
        self.lines.append(line)


async def test_an_interrupt_at_the_terminal_is_not_for_children() -> None:
    """It goes to all of a session's foreground, also to a child that is not ready to ignore it."""
    listener = Listener()
    child = await SystemProcesses().start("platform", listener)
    session = os.getsid(child.pid)
    assert await child.ended(60) == 0
    assert session == child.pid != os.getsid(0)
    assert listener.lines
