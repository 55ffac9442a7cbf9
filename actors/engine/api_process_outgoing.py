"""Messages that wait to be sent to one API process, for all of its requests together. Synchronous.

Each request keeps its own outbox, where chunks merge while the API process is slow; a wake only marks the request. A
frame takes everything that the marked requests have, so each step sends one frame, however many requests run. A paused
reader's output
stays in its request's outbox, whose budget then pauses the sequence.
"""

from collections import deque
from collections.abc import Iterator

from troupellm.actors.output.outbox import LocalOutbox
from troupellm.protocol.errors import RequestAborted, TroupeError
from troupellm.protocol.params.outputs import Delta, TokenLogprob
from troupellm.protocol.wire.api_process import Chunk, Chunks, Ended, PromptChunk, WireError

FRAME_WEIGHT = 262_144
"""About the bytes after which a frame takes no further chunk."""
PORTION = 2048
"""Log-probabilities in one chunk, alternatives included: 150 kB."""
_ENTRY_WEIGHT = 72
_TOKEN_WEIGHT = 5
_CHUNK_WEIGHT = 32


class Sent:
    """A request of the API process, as far as the API process has been told of it."""

    __slots__ = ("backlog", "held", "number", "outbox", "over", "prompt_sent", "sent_opened")

    def __init__(self, number: int, outbox: LocalOutbox) -> None:
        self.number = number
        self.outbox = outbox
        self.held = False
        """Its reader is paused."""
        self.sent_opened = False
        self.prompt_sent = False
        self.over = False
        """The API process was told of its end; the engine may wake a reader that is not there any more."""
        self.backlog: deque[Chunk | PromptChunk] = deque()
        """Taken from the outbox and too much for the last frame."""


class Outgoing:
    """See the module."""

    def __init__(self) -> None:
        self._marked: dict[int, Sent] = {}

    @property
    def empty(self) -> bool:
        return not self._marked

    def mark(self, request: Sent) -> None:
        """There may be something to send."""
        if not request.over:
            self._marked[request.number] = request

    def collect(self) -> Chunks | None:
        """The next frame; None when no request has anything to send."""
        opened: list[int] = []
        prompts: list[PromptChunk] = []
        chunks: list[Chunk] = []
        ended: list[Ended] = []
        waiting: dict[int, Sent] = {}
        weight = 0
        while self._marked and weight < FRAME_WEIGHT:
            number, request = next(iter(self._marked.items()))
            del self._marked[number]
            outbox = request.outbox
            if not request.sent_opened and outbox.prompt_token_ids is not None:
                request.sent_opened = True
                opened.append(number)
                weight += _TOKEN_WEIGHT
            for chunk in _next_chunks(request):
                if isinstance(chunk, PromptChunk):
                    prompts.append(chunk)
                else:
                    chunks.append(chunk)
                weight += _weight(chunk)
                if weight >= FRAME_WEIGHT:
                    break
            if request.backlog or (outbox.waiting and not request.held):
                waiting[number] = request
            elif outbox.terminal and not outbox.waiting:
                ended.append(_end(request))
                request.over = True
                weight += _CHUNK_WEIGHT + len(outbox.vector or b"")
        self._marked |= waiting  # behind those whose turn has not come
        if not (opened or prompts or chunks or ended):
            return None
        return Chunks(opened=tuple(opened), prompts=tuple(prompts), chunks=tuple(chunks), ended=tuple(ended))


def _next_chunks(request: Sent) -> Iterator[Chunk | PromptChunk]:
    """The chunks of a request that wait to be sent, the backlog first. Chunks that the caller does not take stay
    there."""
    backlog, outbox = request.backlog, request.outbox
    if not request.prompt_sent and outbox.logprobs_of_prompt is not None:
        request.prompt_sent = True
        backlog.extend(_prompt_chunks(request.number, outbox.logprobs_of_prompt))
    while not request.held or backlog:
        while backlog:
            yield backlog.popleft()
        if request.held or (delta := outbox.take()) is None:
            return
        backlog.extend(_chunks(request.number, delta))


def _chunks(number: int, delta: Delta) -> Iterator[Chunk]:
    """A delta as one chunk, or as several where its log-probabilities are many: text first, the end last."""
    entries = delta.logprobs
    size = PORTION if not entries else max(1, PORTION // (1 + len(entries[0].top)))
    if entries is None or len(entries) <= size:
        yield Chunk(
            number, delta.index, delta.text, delta.token_ids, entries, delta.finish_reason, delta.stop_reason
        )  # fmt: skip
        return
    # Tokens and entries are parallel, but for a stop token that has an id and no text.
    for start in range(0, len(entries), size):
        last = start + size >= len(entries)
        yield Chunk(
            request=number,
            index=delta.index,
            text=delta.text if start == 0 else "",
            token_ids=delta.token_ids[start:] if last else delta.token_ids[start : start + size],
            logprobs=entries[start : start + size],
            finish_reason=delta.finish_reason if last else None,
            stop_reason=delta.stop_reason if last else None,
            more=not last,
        )


def _prompt_chunks(number: int, entries: tuple[TokenLogprob | None, ...]) -> Iterator[PromptChunk]:
    width = max((1 + len(entry.top) for entry in entries[:2] if entry is not None), default=1)
    size = max(1, PORTION // width)
    for start in range(0, len(entries), size):
        yield PromptChunk(number, entries[start : start + size])


def _weight(chunk: Chunk | PromptChunk) -> int:
    entries = chunk.entries if isinstance(chunk, PromptChunk) else chunk.logprobs
    weight = _CHUNK_WEIGHT
    if isinstance(chunk, Chunk):
        weight += len(chunk.text) + _TOKEN_WEIGHT * len(chunk.token_ids)
    if entries:
        first = entries[-1]
        weight += _ENTRY_WEIGHT * len(entries) * (1 + (len(first.top) if first is not None else 0))
    return weight


def _end(request: Sent) -> Ended:
    outbox = request.outbox
    error: TroupeError | None = outbox.error
    if error is None and outbox.usage is None:
        error = RequestAborted("the request was ended before its answer was complete")
    wire = None if error is None else WireError.of(error)
    usage = outbox.spent if outbox.usage is None else outbox.usage
    return Ended(request=request.number, usage=usage, timing=outbox.timing, pooled=outbox.vector, error=wire)
