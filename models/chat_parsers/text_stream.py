"""The text of an answer while it comes, and the pieces made of it. Coroutines read it and yield to get more text."""

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from troupellm.models.chat_parsers.unwrapped import Unwrapping
from troupellm.protocol.params.chat_events import CallArguments, CallStart, Content, ParsedPiece, Reasoning

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads on as far as the text goes, and yields when it needs more of it."""

MOST_HELD: Final = 64 * 1024
"""Most characters of a text that may become a call. A longer one is no call."""

MOST_TRIED: Final = 4 * MOST_HELD
"""Characters of reasoning that is read as calls and turns out to be none, in one answer."""

MOST_CALLS: Final = 128
"""Most calls in one answer; later ones are content."""

_SPACES: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]*")
_LONGEST_NAME: Final = 128
_CONTENT, _REASONING, _ARGUMENTS = range(3)

NewId = Callable[[int, str], str]
"""Makes an id from the number of a call and the name of its function."""


class NotACall(Exception):
    """The text began like a call and is none; it is shown unchanged."""


WrapperFor = Callable[[str], Unwrapping | None]
"""Returns how the arguments of a function are unwrapped; None if they never are."""


class _Trial:
    """The state to which a rejected trial returns."""

    __slots__ = ("allows", "calls", "ids", "joint", "length", "out", "spoken", "taken", "whole")

    def __init__(self, source: "Source", allows: Callable[[str], bool]) -> None:
        self.allows = allows
        self.out = source.drain()
        self.taken: list[str] = []
        self.length = 0
        self.calls = source.calls
        self.whole = source.whole
        self.spoken, self.joint = source.spoken, source.joint
        self.ids = set(source.ids)


class Source:
    """Unread text, output, and the text of an attempt or trial that may have to be shown after all."""

    __slots__ = (
        "_gap", "_held", "_held_length", "_kind", "_most_calls", "_new_id", "_out", "_parts", "_trial",
        "_unwrapping", "_wrapper", "calls", "cut", "ended", "ids", "joint", "named", "pos",
        "region", "repaired", "spoken",
        "text", "torn", "tried", "whole",
    )  # fmt: skip

    def __init__(self, new_id: NewId, most_calls: int, wrapper: WrapperFor | None = None) -> None:
        """
        Args:
            most_calls: later calls are read and not shown.
            wrapper: see `WrapperFor`.
        """
        self.text = ""
        self.pos = 0
        self.ended = False
        """No more text comes."""
        self.cut = False
        """A limit or a stop string ended the text, and not the model."""
        self.calls = 0
        self.whole = True
        """The last call that is shown has all its arguments."""
        self.region = "start"
        """The region being read; for tests and logs."""
        self._held: list[str] | None = None
        self._held_length = 0
        self._gap = ""
        self._out: list[ParsedPiece] = []
        self._kind = _CONTENT
        self._parts: list[str] = []
        self._new_id = new_id
        self._most_calls = most_calls
        self.ids: set[str] = set()
        """Ids of all calls."""
        self.named = ("", "")
        """Name and id that the attempt has read so far."""
        self.spoken = ""
        """The last character of content; empty before there is any."""
        self.joint = False
        """A call came behind content: more content begins on a line of its own."""
        self.tried = 0
        """Characters of rejected trials."""
        self.repaired = False
        """Arguments were closed that the model has left open."""
        self.torn = False
        """The text ends within a mark that was looked for."""
        self._trial: _Trial | None = None
        self._wrapper = wrapper
        self._unwrapping: Unwrapping | None = None

    # Text.

    def add(self, text: str) -> None:
        self.text = self.text[self.pos :] + text
        self.pos = 0

    @property
    def pending(self) -> str:
        """Text that has not been shown yet, and may be."""
        tried = "".join(self._trial.taken) if self._trial is not None else self._gap + "".join(self._held or ())
        return tried + self.text[self.pos :]

    @property
    def ran_out(self) -> bool:
        """True if a limit ended the text, and all of it was read, up to the beginning of a mark."""
        return self.ended and self.cut and (self.torn or self.pos >= len(self.text))

    def take(self, count: int) -> str:
        """
        Raises:
            NotACall: more is held than may be; nothing was taken beyond that.
        """
        if self._held is not None and self._held_length + count > MOST_HELD:
            self._keep(MOST_HELD - self._held_length)
            raise NotACall
        return self._keep(count)

    def _keep(self, count: int) -> str:
        taken = self.text[self.pos : self.pos + count]
        self.pos += count
        if self._held is not None:
            self._held.append(taken)
            self._held_length += count
        trial = self._trial
        if trial is not None:
            trial.taken.append(taken)
            trial.length += count
            if trial.length > MOST_HELD:
                raise NotACall
        return taken

    def back(self, count: int) -> None:
        """Make the characters that were taken last unread again; only outside of attempts, and before more text."""
        self.pos -= count
        if self._trial is not None and count:
            self._trial.taken = ["".join(self._trial.taken)[:-count]]
            self._trial.length -= count

    # Trials: the output waits, and the text can be read again in another way.

    def begin_trial(self, allows: Callable[[str], bool]) -> None:
        """Hold all output until `accept` or `reject`. A trial that takes too much text raises NotACall.

        Args:
            allows: whether a function may be called; another one raises NotACall.
        """
        self._trial = _Trial(self, allows)
        self.repaired = False

    def accept(self) -> None:
        """Show the result of the trial."""
        assert self._trial is not None, "a trial was begun"
        self._flush()
        trial, self._trial = self._trial, None
        self._out = trial.out + self._out

    def reject(self) -> None:
        """Return to the state before the trial; its text is unread again."""
        assert self._trial is not None, "a trial was begun"
        trial, self._trial = self._trial, None
        self.tried += trial.length
        self._held, self._gap, self._unwrapping = None, "", None
        self._parts.clear()
        self._out = trial.out
        self.text, self.pos = "".join(trial.taken) + self.text[self.pos :], 0
        self.calls, self.whole, self.spoken, self.joint = trial.calls, trial.whole, trial.spoken, trial.joint
        self.ids = trial.ids

    @property
    def trying(self) -> bool:
        return self._trial is not None

    # Attempts: only the text is held.

    def attempt(self, gap: str = "", opening: str = "") -> None:
        """Hold back all consumed text from here on, until `commit` or `give_up`.

        Args:
            gap: white space before, which is shown only if this is no call.
            opening: text that was read already.
        """
        self._gap = gap
        self._held = [opening]
        self._held_length = len(opening)
        self.named = ("", "")

    @property
    def attempting(self) -> bool:
        return self._held is not None

    def commit(self) -> None:
        self._held, self._gap = None, ""

    def give_up(self) -> str:
        """The text that was held, with the white space before it."""
        held = self._gap + "".join(self._held or ())
        self.commit()
        return held

    # Output. Neighbours of a kind become one piece.

    def content(self, text: str) -> None:
        if not text:
            return
        self._end_arguments()
        if self.joint:
            self.joint = False
            if self.spoken != "\n" and text[0] != "\n":
                text = "\n" + text
        self.spoken = text[-1]
        self._say(_CONTENT, text)

    def reasoning(self, text: str) -> None:
        self._say(_REASONING, text)

    def call(self, name: str, call_id: str = "") -> None:
        """A call begins; the held text was its beginning.

        Args:
            call_id: as the model wrote it; empty where it wrote none.

        Raises:
            NotACall: there were too many already.
        """
        if self.calls >= MOST_CALLS or (self._trial is not None and not self._trial.allows(name)):
            raise NotACall
        self.commit()
        self._end_arguments()
        self._flush()
        number, self.calls = self.calls, self.calls + 1
        self.joint = bool(self.spoken)
        if number < self._most_calls:
            self.whole = False
            self._unwrapping = None if self._wrapper is None else self._wrapper(name)
            self._out.append(CallStart(number, self._own_id(number, name, call_id), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the last call."""
        if self.calls <= self._most_calls:
            if self._unwrapping is not None:
                text = self._unwrapping.add(text)
                if self._unwrapping.done:
                    self._unwrapping = None
            self._say(_ARGUMENTS, text)

    def end_call(self) -> None:
        """The last call has all its arguments."""
        if self.calls <= self._most_calls:
            self.whole = True
            self._end_arguments()

    def _end_arguments(self) -> None:
        unwrapping, self._unwrapping = self._unwrapping, None
        if unwrapping is not None and not unwrapping.done:
            self._say(_ARGUMENTS, unwrapping.rest(whole=self.whole))

    def _own_id(self, number: int, name: str, call_id: str) -> str:
        """An id that no other call of the answer has: models write the same one twice."""
        found = call_id or self._new_id(number, name)
        for other in range(MOST_CALLS):
            if found not in self.ids:
                break
            found = self._new_id(other, name)
        self.ids.add(found)
        return found

    def drain(self) -> list[ParsedPiece]:
        """The pieces since the last time, without those of a trial."""
        if self._trial is not None:
            out, self._trial.out = self._trial.out, []
            return out
        if self.ended:
            self._end_arguments()
        self._flush()
        out, self._out = self._out, []
        return out

    def _say(self, kind: int, text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        if self._kind == _CONTENT:
            self._out.append(Content(text))
        elif self._kind == _REASONING:
            self._out.append(Reasoning(text))
        else:
            self._out.append(CallArguments(self.calls - 1, text))


# Reading.


def more(source: Source) -> Reading[bool]:
    """Wait for text; False at the end of it."""
    while source.pos >= len(source.text):
        if source.ended:
            return False
        yield
    return True


def spaces(source: Source) -> Reading[None]:
    """Skip white space. The next character is another one, or there is none."""
    while (yield from more(source)):
        match = _SPACES.match(source.text, source.pos)
        if match is not None and match.end() > source.pos:
            source.take(match.end() - source.pos)
        if source.pos < len(source.text):
            return


def peek(source: Source) -> Reading[str]:
    """The next character, which is not taken; empty at the end."""
    there = yield from more(source)
    return source.text[source.pos] if there else ""


def beyond(source: Source, seen: int) -> Reading[None]:
    """Wait until there are more than `seen` unread characters, or no more will come."""
    while len(source.text) - source.pos <= seen and not source.ended:
        yield


def comes(source: Source, text: str) -> Reading[bool]:
    """True if `text` comes next. Consumes nothing."""
    while not source.text.startswith(text, source.pos):
        available = len(source.text) - source.pos
        if source.ended:
            source.torn = source.torn or (available > 0 and text.startswith(source.text[source.pos :]))
            return False
        if available >= len(text) or not text.startswith(source.text[source.pos :]):
            return False
        yield
    return True


def literal(source: Source, text: str) -> Reading[bool]:
    """Take `text` if it comes next, else nothing."""
    if not (yield from comes(source, text)):
        return False
    source.take(len(text))
    return True


def word(source: Source) -> Reading[str]:
    """A run of the characters that names have.

    Raises:
        NotACall: there is none, or it is too long.
    """
    parts: list[str] = []
    length = 0
    while (yield from more(source)):
        match = _NAME.match(source.text, source.pos)
        end = source.pos if match is None else min(match.end(), source.pos + _LONGEST_NAME + 1 - length)
        length += end - source.pos
        parts.append(source.take(end - source.pos))
        if source.pos < len(source.text):
            break
    if not 0 < length <= _LONGEST_NAME:
        raise NotACall
    return "".join(parts)
