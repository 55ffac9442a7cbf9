"""Admission: how many requests and prompt tokens may be inside the engine at once.

Counted before anything is tokenized, so a refusal costs microseconds: a request with n answers counts n times, text is
estimated by its length until the tokenizer has spoken. Those who wait are served strictly in their order.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from troupellm.actors.ports import Clock
from troupellm.actors.waiter import Waiter, new_waiter
from troupellm.protocol.config import SchedulerConfig
from troupellm.protocol.errors import EngineOverloaded, EngineStopped
from troupellm.protocol.intake import ChatPrompt, Prompt, TextPrompt, TokensPrompt

CHARACTERS_PER_TOKEN = 4
_SMOOTHING = 0.2
_RETRY_AFTER_RANGE = (1.0, 30.0)


def estimate_tokens(prompt: Prompt) -> int:
    """Prompt tokens, roughly, without touching the tokenizer."""
    match prompt:
        case TokensPrompt(token_ids=token_ids):
            return len(token_ids)
        case TextPrompt(text=text):
            return len(text) // CHARACTERS_PER_TOKEN + 1
        case ChatPrompt(messages=messages):
            letters = sum(_letters(message) for message in messages)
            return letters // CHARACTERS_PER_TOKEN + 4 * len(messages) + 1


def _letters(value: object) -> int:
    """Characters of text in a message or a part of one; what has another shape is refused later, by its reader."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_letters(value.get(field)) for field in ("content", "text"))
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return sum(_letters(part) for part in value if isinstance(part, Mapping))
    return 0


class Place:
    """What one request takes up. Every method is idempotent in effect: a place is left once, and stops waiting once."""

    __slots__ = ("_admission", "_waiting_tokens", "sequences")

    def __init__(self, admission: "Admission", sequences: int, tokens: int) -> None:
        self._admission = admission
        self.sequences = sequences
        self._waiting_tokens = tokens

    def tokenized(self, tokens: int) -> None:
        """The prompt's true length, instead of the estimate."""
        if self._waiting_tokens:
            self._admission.change(tokens=tokens - self._waiting_tokens)
            self._waiting_tokens = tokens

    def scheduled(self) -> None:
        """Its prompt waits no longer."""
        self._admission.change(tokens=-self._waiting_tokens)
        self._waiting_tokens = 0

    def leave(self) -> None:
        tokens, sequences = self._waiting_tokens, self.sequences
        self._waiting_tokens = self.sequences = 0
        if sequences:
            self._admission.left(sequences, tokens)


class _Applicant:
    __slots__ = ("place", "sequences", "tokens", "waiter")

    def __init__(self, sequences: int, tokens: int) -> None:
        self.sequences = sequences
        self.tokens = tokens
        self.place: Place | None = None
        self.waiter: Waiter = new_waiter()


class Admission:
    """The engine's door. A request larger than the whole room is let in when it is empty."""

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        self.capacity = config.max_num_seqs + config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._clock = clock
        self._sequences = 0
        self._tokens = 0
        self._line: deque[_Applicant] = deque()
        self._closed = False
        self._seconds_per_leave: float | None = None
        self._last_leave: float | None = None

    @property
    def waiting(self) -> int:
        return len(self._line)

    def enter(self, sequences: int, tokens: int) -> Place:
        """Take a place now.

        Raises:
            EngineOverloaded: there is none; `retry_after` guesses from how fast places became free.
            EngineStopped: the engine takes no more requests.
        """
        self._check_open()
        if self._line or not self._fits(sequences, tokens):
            raise EngineOverloaded(
                f"the waiting room is full: {self._sequences} of {self.capacity} places are taken",
                retry_after=self._retry_after(sequences),
            )
        return self._admit(sequences, tokens)

    async def wait(self, sequences: int, tokens: int) -> Place:
        """Take a place, waiting in line for it.

        Raises:
            EngineStopped: the engine takes no more requests.
        """
        self._check_open()
        if not self._line and self._fits(sequences, tokens):
            return self._admit(sequences, tokens)
        applicant = _Applicant(sequences, tokens)
        self._line.append(applicant)
        try:
            await applicant.waiter.wait()
        except BaseException:
            if applicant.place is not None:
                applicant.place.leave()
            elif applicant in self._line:
                self._line.remove(applicant)
                self._serve()
            raise
        if applicant.place is None:
            self._check_open()
            raise EngineStopped("the engine is stopping")
        return applicant.place

    def close(self) -> None:
        """Nobody is let in any more; those in line get `EngineStopped`."""
        self._closed = True
        while self._line:
            self._line.popleft().waiter.wake()

    def change(self, *, tokens: int) -> None:
        self._tokens += tokens
        if tokens < 0:
            self._serve()

    def left(self, sequences: int, tokens: int) -> None:
        now = self._clock.now()
        if self._last_leave is not None:
            gap = (now - self._last_leave) / sequences
            last = self._seconds_per_leave
            self._seconds_per_leave = gap if last is None else last + _SMOOTHING * (gap - last)
        self._last_leave = now
        self._sequences -= sequences
        self._tokens -= tokens
        self._serve()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the engine takes no more requests")

    def _fits(self, sequences: int, tokens: int) -> bool:
        room = self._sequences == 0 or self._sequences + sequences <= self.capacity
        return room and (self._max_tokens is None or self._tokens == 0 or self._tokens + tokens <= self._max_tokens)

    def _admit(self, sequences: int, tokens: int) -> Place:
        self._sequences += sequences
        self._tokens += tokens
        return Place(self, sequences, tokens)

    def _serve(self) -> None:
        while self._line and self._fits(self._line[0].sequences, self._line[0].tokens):
            applicant = self._line.popleft()
            applicant.place = self._admit(applicant.sequences, applicant.tokens)
            applicant.waiter.wake()

    def _retry_after(self, sequences: int) -> float:
        """Seconds until so many places should be free, and those in line served."""
        low, high = _RETRY_AFTER_RANGE
        ahead = sequences + sum(applicant.sequences for applicant in self._line)
        return min(max((self._seconds_per_leave or low) * ahead, low), high)
