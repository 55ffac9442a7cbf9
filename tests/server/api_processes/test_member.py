"""One front's parent, without the process."""

from typing import Any, cast

import anyio
import pytest

from troupellm.protocol.wire.api_process import AskAdmin, CancelAdmin
from troupellm.server.api_processes.process import ApiProcess

pytestmark = pytest.mark.anyio


class Desk:
    """A fleet whose admin actions last until they are cancelled."""

    def __init__(self) -> None:
        self.admin_actions = self

    async def act(self, name: str, arguments: bytes) -> bytes:
        await anyio.sleep_forever()
        return b""


async def test_an_admin_action_cancelled_before_its_begin_does_not_run() -> None:
    api_process = ApiProcess(cast(Any, Desk()), 0, cast(Any, None))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:  # which ends when the action has ended
            api_process._group = group
            api_process._on_message(AskAdmin(query=1, action="pause", arguments=b"{}"))
            api_process._on_message(CancelAdmin(1))
    assert not api_process._asked
