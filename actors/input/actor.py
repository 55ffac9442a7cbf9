"""Input processor: renders, tokenizes and validates a request before anybody else hears of it.

Owns:      nothing but the requests being prepared.
Receives:  IntakeMessage.
Sends:     OpenRequest to the output actor, then SubmitRequest to the scheduler, or both with the guide that a request
           asks for to the guide actor; a refusal to the request's outbox, and AbortRequest to the scheduler when that
           comes late.
On crash:  each request that it was preparing is answered; those in the mailbox wait for the next one.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Never

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from troupellm.actors.input.long_texts import LONG_LETTERS, LongTexts
from troupellm.actors.input.media_prompt import MediaPrompts
from troupellm.actors.input.prepare import Prepared, Preparer
from troupellm.actors.kv_cache.block_hash import PrefixHasher
from troupellm.actors.runtime.mailbox import Mailbox, MailboxClosed
from troupellm.actors.runtime.ports import Clock, Randomness, Threads
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.media.description import MediaModel
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import EngineStopped, RequestFailed, TroupeError
from troupellm.protocol.messages.guide import GuideControl, GuideMessage, GuideRequest
from troupellm.protocol.messages.input import (
    ChatPrompt,
    EmbedsPrompt,
    IntakeMessage,
    PairPrompt,
    PrepareRequest,
    Prompt,
    TextPrompt,
    TokensPrompt,
)
from troupellm.protocol.messages.output import OutputMessage
from troupellm.protocol.messages.scheduler import AbortRequest, SchedulerControl, SchedulerMessage
from troupellm.protocol.messages.worker import WorkerReady
from troupellm.protocol.params.sampling import Limits, SamplingParams

INLINE_CHARACTERS = 1000
"""Texts up to this length are tokenized on the event loop (under a millisecond); a thread costs more than it saves."""
_INLINE_BYTES = 2**20
_INLINE_IDS = 2048
"""Lists of token ids up to this length are checked, packed and hashed on the event loop: 0.2 ms."""


class Intake:
    """The asynchronous shell. A long prompt goes through the threads while others overtake it."""

    def __init__(
        self,
        inbox: Mailbox[IntakeMessage, Never],
        output: Mailbox[OutputMessage, Never],
        scheduler: Mailbox[SchedulerMessage, SchedulerControl],
        guide: Mailbox[GuideMessage, GuideControl],
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        limits: Limits,
        ready: WorkerReady,
        threads: Threads,
        clock: Clock,
        randomness: Randomness,
        rows: Iterator[int],
        hash_key: bytes | None = None,
        media: MediaModel | None = None,
    ) -> None:
        """
        Args:
            rows: numbers for sequences, the same iterator after a restart.
            hash_key: the scheduler's, whose prefix cache finds prompts by the keys made here; None without that cache.
            media: of a model that sees images.
        """
        self._inbox = inbox
        self._output = output
        self._scheduler = scheduler
        self._guide = guide
        self._long_texts = LongTexts(threads, clock)
        self._randomness = randomness
        hasher = None if hash_key is None else PrefixHasher(hash_key, ready.block_size)
        images = None if media is None else MediaPrompts(media, tokenizer)
        self._preparer = Preparer(tokenizer, chat_template, limits, ready, rows, hasher, images)
        self._patient = Preparer(tokenizer, chat_template.patient, limits, ready, rows, hasher, images)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until the inbox is closed and empty and everything in it was passed on."""
        task_status.started()
        async with anyio.create_task_group() as group:
            while await self._inbox.wait():
                while (message := self._inbox.take()) is not None:
                    seed = self._randomness.seed()  # here, so that seeds follow the order of arrival
                    if is_short(message.submission.prompt) and has_short_lists(message.submission.params):
                        await self._pass_on(message, seed, in_thread=False)
                    else:  # at most as many as admission lets in
                        group.start_soon(self._pass_on_from_thread, message, seed)
                    await anyio.lowlevel.checkpoint()  # after each: a burst of short texts takes long all the same

    async def _pass_on_from_thread(self, message: PrepareRequest, seed: int) -> None:
        await self._pass_on(message, seed, in_thread=True)

    async def _pass_on(self, message: PrepareRequest, seed: int, *, in_thread: bool) -> None:
        """Prepare one request and send it on, or answer it. The choke point for what a request's content raises."""
        try:
            prepared = await self._prepared(message, seed, in_thread=in_thread)
            if prepared is None:
                return
            if (spec := message.submission.params.guide) is not None:
                asked = GuideRequest(spec=spec, opened=prepared.opened, submitted=prepared.submitted)
                await self._guide.put(asked)
            else:
                await self._output.put(prepared.opened)
                await self._scheduler.put(prepared.submitted)
        except MailboxClosed:
            self._give_up(message, EngineStopped("the engine was closed"))
        except anyio.get_cancelled_exc_class():  # another actor crashed, unless every caller has been answered already
            self._give_up(message, EngineStopped("the input processor crashed", code="engine_restarting"))
            raise
        except Exception as cause:
            self._give_up(message, _unprepared(cause))
            raise

    async def _prepared(self, message: PrepareRequest, seed: int, *, in_thread: bool) -> Prepared | None:
        quick = partial(self._preparer.prepare, message, seed)
        try:
            if not in_thread:
                return quick()
            letters = letters_of(message.submission.prompt, LONG_LETTERS)
            patient = partial(self._patient.prepare, message, seed)
            return await self._long_texts.run_twice(message.submission.tenant, letters, quick, patient)
        except TroupeError as error:
            _refuse(message, error)
        except Exception as cause:  # a template or a tokenizer that breaks breaks this request only
            _refuse(message, _unprepared(cause))
        return None

    def _give_up(self, message: PrepareRequest, error: TroupeError) -> None:
        """Answer a request that others may have heard of already."""
        _refuse(message, error)
        self._scheduler.control(AbortRequest(message.request))


def is_short(prompt: Prompt) -> bool:
    """Whether preparing it takes about a millisecond at most. A chat is never short: it waits for another process."""
    match prompt:
        case TokensPrompt(token_ids=token_ids):
            return len(token_ids) <= _INLINE_IDS
        case EmbedsPrompt(embeddings=embeddings):
            return len(embeddings) <= _INLINE_BYTES
        case TextPrompt(text=text):
            return not isinstance(text, str) or len(text) <= INLINE_CHARACTERS
        case PairPrompt(text=text, second=second):
            return len(text) + len(second) <= INLINE_CHARACTERS
        case ChatPrompt():
            return False


def has_short_lists(params: SamplingParams) -> bool:
    """Whether checking the parameters, and tokenizing the bad words twice each, takes about a millisecond at most."""
    num_ids = len(params.stop_token_ids or ()) + len(params.allowed_token_ids or ())
    return num_ids <= _INLINE_IDS and 2 * _letters(params.bad_words or (), INLINE_CHARACTERS) <= INLINE_CHARACTERS


def letters_of(prompt: Prompt, most: int) -> int:
    """Characters of a prompt's text; behind `most` they are not counted."""
    match prompt:
        case TextPrompt(text=text):
            return len(text) if isinstance(text, str) else 0
        case PairPrompt(text=text, second=second):
            return len(text) + len(second)
        case ChatPrompt(messages=messages, tools=tools, documents=documents):
            return _letters([messages, tools, documents], most)
        case _:
            return 0


def _letters(value: Any, most: int) -> int:
    """Characters of all text inside a value of any shape, until they are more than `most`."""
    total, pending = 0, [value]
    while pending and total <= most:
        match pending.pop():
            case str() as text:
                total += len(text)
            case dict() as mapping:
                pending.extend(mapping.values())
            case list() | tuple() as parts:
                pending.extend(parts)
        total += 1
    return total


def _unprepared(cause: Exception) -> RequestFailed:
    failure = RequestFailed("the request could not be prepared")
    failure.__cause__ = cause
    return failure


def _refuse(message: PrepareRequest, error: TroupeError) -> None:
    message.outbox.fail(error)
    message.outbox.wake()
