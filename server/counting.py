"""What only counts tokens: one at a time, on a thread that no prompt to be answered waits for, with a bounded line.

Nothing else bounds it: admission is for what is to be generated, and what is counted may be longer than the context.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple, Unpack

import anyio

from troupellm.actors.intake import render
from troupellm.protocol.errors import EngineOverloaded, QueueTimeout
from troupellm.protocol.intake import Prompt
from troupellm.server.offload import offload
from troupellm.server.served import ServedEngine

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

MOST_WAITING = 64
"""Beside the one that is counted: more are told to come again."""
WAIT_SECONDS = 30.0
"""The longest body takes some seconds."""


class Counting:
    """Of one process. Implements `Threads`."""

    def __init__(self) -> None:
        self.inside = 0
        """Calls that wait, and the one that runs."""
        self._turn = anyio.CapacityLimiter(1)

    async def of(
        self, engine: ServedEngine, prompt: Prompt, use: Callable[[Sequence[int]], T], most_tokens: int | None = None
    ) -> T:
        """What `use` makes of the token ids that a prompt becomes; on the thread as well, where the prompt is long.

        Args:
            most_tokens: a text that cannot fit into so many is not tokenized; None takes any.

        Raises:
            InvalidRequest: the prompt cannot be rendered or tokenized, or is too long.
            EngineOverloaded, QueueTimeout: see `run`.
        """
        return await render(prompt, engine.tokenizer, engine.speaker.template, self, use, most_tokens)

    async def run(self, function: Callable[[Unpack[ArgsT]], T], *args: *ArgsT) -> T:
        """Call on the one thread, after those who came before. Whoever leaves while it runs holds it until it ends.

        Raises:
            EngineOverloaded: too many wait already.
            QueueTimeout: the others took too long.
        """
        if self.inside > MOST_WAITING:
            raise EngineOverloaded(f"{MOST_WAITING} requests wait for their tokens to be counted, which is the most")
        self.inside += 1
        try:
            with anyio.move_on_after(WAIT_SECONDS):  # of the wait alone: a call that runs is shielded
                return await offload(function, *args, limiter=self._turn)
        finally:
            self.inside -= 1
        raise QueueTimeout(f"the request waited longer than {WAIT_SECONDS:g} seconds for its tokens to be counted")
