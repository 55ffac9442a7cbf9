"""Token counting without an answer: on threads of its own, with a bounded queue.

Nothing else bounds it: admission is for what is to be generated, and what is counted may be longer than the context.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

import anyio

from troupellm.actors.guide.fair_queue import Turns
from troupellm.actors.input.actor import is_short, letters_of
from troupellm.actors.input.long_texts import LONG_LETTERS, PARALLEL
from troupellm.actors.input.tokenize import count_tokens, tokenize
from troupellm.actors.runtime.ports import SystemClock
from troupellm.models.chat_template.template import ChatTemplate, SlowTemplate
from troupellm.protocol.errors import EngineOverloaded, QueueTimeout
from troupellm.protocol.messages.input import ChatPrompt, Prompt, TextPrompt
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.served_engine import ServedEngine

T = TypeVar("T")


class Charge:
    """Of one call that counts."""

    def __init__(self) -> None:
        self.tokens = 0
        """The true number, once it is known; a call that fails is charged as a request only."""


@asynccontextmanager
async def charged(engine: ServedEngine, exchange: Exchange, estimate: int) -> AsyncIterator[Charge]:
    """A call counts as one request of its key, with the tokens that it counts.

    Args:
        estimate: of these tokens.

    Raises:
        RateLimited: the key has reached a limit per minute.
    """
    exchange.quota = await engine.charge(exchange.key, estimate)
    charge = Charge()
    try:
        yield charge
    finally:
        engine.correct_charge(exchange.key, charge.tokens - estimate)


@contextmanager
def charged_anew(engine: ServedEngine, exchange: Exchange, charge: Charge | None) -> Iterator[None]:
    """A request that was counted goes on inside the block to be answered, and is charged itself when it is admitted.
    The charge of the count is given back, and taken again if the request ends before it is admitted.

    Args:
        charge: None where nothing was counted.
    """
    if charge is None:
        yield
        return
    counted = exchange.quota
    engine.correct_charge(exchange.key, -charge.tokens, requests=-1)
    try:
        yield
    finally:
        if exchange.quota is counted:
            engine.correct_charge(exchange.key, charge.tokens, requests=1)


MOST_WAITING = 64
"""Beside those that are counted: more are told to come again."""
WAIT_SECONDS = 30.0
"""The longest body takes some seconds."""


class Counting:
    """Of one process: two calls at once, the keys in turn."""

    def __init__(self) -> None:
        self.inside = 0
        """Calls that wait, and those that run."""
        self._turns = Turns(PARALLEL, SystemClock())
        self._threads = anyio.CapacityLimiter(PARALLEL)

    async def number(
        self, engine: ServedEngine, tenant: str, prompt: TextPrompt | ChatPrompt, most_tokens: int | None = None
    ) -> int:
        """How many tokens a prompt has.

        Args:
            tenant: the key of the request.
            most_tokens: a text that cannot fit into so many is not tokenized; None takes any.

        Raises:
            InvalidRequest: the prompt cannot be rendered or tokenized, or is too long.
            EngineOverloaded, QueueTimeout: see `run`.
        """

        def work(template: ChatTemplate) -> int:
            return count_tokens(prompt, engine.tokenizer, template, most_tokens)

        return await self._work(engine, tenant, prompt, work)

    async def tokens(
        self,
        engine: ServedEngine,
        tenant: str,
        prompt: Prompt,
        use: Callable[[Sequence[int]], T],
        most_tokens: int | None = None,
        answer_tokens: int = 0,
    ) -> T:
        """The result of `use` for the token ids of a prompt; on the thread as well, where the prompt is long.

        Args:
            most_tokens: a prompt that has more is refused, or cut where it says so; None takes any.
            answer_tokens: what is left free by a prompt that is cut to what fits.

        Raises:
            InvalidRequest: the prompt cannot be rendered or tokenized.
            ContextLengthExceeded: it has more than `most_tokens`.
            EngineOverloaded, QueueTimeout: see `run`.
        """

        def work(template: ChatTemplate) -> T:
            return use(tokenize(prompt, engine.tokenizer, template, most_tokens, answer_tokens).token_ids)

        return await self._work(engine, tenant, prompt, work)

    async def _work(self, engine: ServedEngine, tenant: str, prompt: Prompt, work: Callable[[ChatTemplate], T]) -> T:
        template, letters = engine.chat_format.template, letters_of(prompt, LONG_LETTERS)
        if is_short(prompt):
            return work(template)
        try:
            return await self.run(tenant, letters, partial(work, template))
        except SlowTemplate:
            return await self.run(tenant, LONG_LETTERS, partial(work, template.patient))

    async def run(self, tenant: str, size: int, function: Callable[[], T]) -> T:
        """Call on a thread when the turn has come. A call that its caller leaves keeps its turn until it ends.

        Args:
            size: characters of the text; among the calls of one key the shorter ones go first.

        Raises:
            EngineOverloaded: too many wait already.
            QueueTimeout: the others took too long.
        """
        if self.inside >= MOST_WAITING + PARALLEL:
            raise EngineOverloaded(f"{MOST_WAITING} requests wait for their tokens to be counted, which is the most")
        self.inside += 1
        try:
            with anyio.move_on_after(WAIT_SECONDS) as wait:
                async with self._turns.turn(self._turns.queue(tenant, size)):
                    wait.deadline = math.inf
                    return await offload(function, limiter=self._threads)
        finally:
            self.inside -= 1
        raise QueueTimeout(f"the request waited longer than {WAIT_SECONDS:g} seconds for its tokens to be counted")
