"""Long work of a request off the event loop."""

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread

from troupellm.server.base.errors import not_ready

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

_NO_THREAD = "can't start new thread"


async def offload(
    function: Callable[[Unpack[ArgsT]], T], *args: *ArgsT, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """Call a function on a thread, of those that all share unless `limiter` says how many may do so at once.

    Raises:
        HttpError: 503, the machine gives no more threads.
    """
    try:
        return await anyio.to_thread.run_sync(function, *args, limiter=limiter)
    except RuntimeError as error:
        if str(error) == _NO_THREAD:
            raise not_ready("the server has no threads left", code="server_is_overloaded") from error
        raise
