"""Beam search as a decision alone: which continuations go on after a step, which are answers. Knows no blocks.

As vLLM has it: a step looks at the likeliest tokens of every beam (twice as many as there are beams). Those that end a
sequence make an answer, the best of the others are the new beams. Answers are ranked by their cumulative
log-probability divided by length ** length_penalty, where the length counts the prompt and not the token that ended it.
"""

from array import array
from collections.abc import Iterator
from itertools import pairwise

from troupellm.protocol.messages.scheduler import BeamSettings
from troupellm.protocol.messages.worker import RowLogprobs


class _Token:
    """A chosen token at the end of a path; beams share the beginnings of their paths."""

    __slots__ = ("alternatives", "alternatives_logprobs", "logprob", "previous", "rank", "token")

    def __init__(self, previous: "_Token | None", token: int, logprob: float, rank: int, entry: "_Entry") -> None:
        self.previous = previous
        self.token = token
        self.logprob = logprob
        self.rank = rank
        self.alternatives = entry.tokens
        """Of the step that chose it, likeliest first."""
        self.alternatives_logprobs = entry.logprobs


class _Entry:
    """The likeliest tokens behind a beam."""

    __slots__ = ("logprobs", "tokens")

    def __init__(self, entry: RowLogprobs) -> None:
        self.tokens = array("i", entry.token_ids)[1 : entry.width]
        self.logprobs = array("f", entry.logprobs)[1 : entry.width]


class _Beam:
    __slots__ = ("cumulative", "path", "place")

    def __init__(self, place: int, cumulative: float, path: _Token | None) -> None:
        self.place = place
        """Which of the request's sequences computes it."""
        self.cumulative = cumulative
        self.path = path


class Step:
    """One sequence goes on: it becomes `parent` and then has one more token."""

    __slots__ = ("parent", "place", "token")

    def __init__(self, place: int, parent: int, token: int) -> None:
        self.place = place
        self.parent = parent
        self.token = token


class Answer:
    """A sequence that is complete."""

    __slots__ = ("cumulative", "path", "score", "stop_token")

    def __init__(self, path: _Token, cumulative: float, score: float, stop_token: int | None) -> None:
        self.path = path
        self.cumulative = cumulative
        self.score = score
        self.stop_token = stop_token
        """The token that ended it, which is its last; None where it was cut at its limit."""

    def steps(self) -> "list[_Token]":
        """First token first."""
        found: list[_Token] = []
        token: _Token | None = self.path
        while token is not None:
            found.append(token)
            token = token.previous
        return found[::-1]


class BeamSearch:
    """One request's search.

    Attributes:
        answers: the best complete ones so far, best first; at most as many as there are beams.
        begun: the first step has been decided, so that all sequences are beams.
        num_steps: decided since the beams were last computed from the start.
    """

    def __init__(
        self, settings: BeamSettings, width: int, *, num_prompt_tokens: int, limit: int, stops: frozenset[int]
    ) -> None:
        """limit: most tokens of a sequence, prompt included. stops: tokens that end a sequence."""
        self.settings = settings
        self.answers: list[Answer] = []
        self.begun = False
        self.num_steps = 0
        self._width = width
        self._limit = limit
        self._stops = stops
        self._length = num_prompt_tokens
        self._beams = [_Beam(0, 0.0, None)]
        self._entries: dict[int, _Entry] = {}

    def fits(self, entry: RowLogprobs) -> bool:
        """Whether a worker's report describes the next token of a beam, and enough of its candidates."""
        width = entry.width
        sizes = (len(entry.token_ids), len(entry.logprobs), len(entry.ranks)) == (4 * width, 4 * width, 4)
        if not sizes or entry.position != self._length or width <= self.settings.num_candidates:
            return False
        values = array("f", entry.logprobs)[1:]
        return all(above >= below for above, below in pairwise(values))  # NaN fails

    def note(self, place: int, entry: RowLogprobs) -> bool:
        """Record the model's candidates for the beam at `place`; True once every beam has an entry."""
        self._entries[place] = _Entry(entry)
        return len(self._entries) == len(self._beams)

    def forget(self) -> None:
        """Drop the entries: the beams are computed again and get new ones."""
        self._entries.clear()
        self.num_steps = 0

    def decide(self) -> list[Step] | None:
        """The next step of every sequence, or None: the search is over and `answers` are final."""
        chosen = self._choose()
        self._entries.clear()
        self.begun = True
        self.num_steps += 1
        self._length += 1
        if self._length >= self._limit:
            for beam, entry, rank in chosen:
                self._complete(beam, entry, rank, None)
            return None
        if len(self.answers) == self._width and (self.settings.early_stopping or self._settled(chosen)):
            return None
        return self._follow(chosen)

    def _choose(self) -> list[tuple[_Beam, _Entry, int]]:
        """The best continuations; those that end a sequence become answers."""
        found: list[tuple[float, _Beam, _Entry, int]] = []
        for beam, entry, rank in self._candidates():
            token = entry.tokens[rank]
            if token in self._stops:
                self._complete(beam, entry, rank, token)
            else:
                found.append((-beam.cumulative - entry.logprobs[rank], beam, entry, rank))
        found.sort(key=lambda candidate: candidate[0])  # of equals the better beam's comes first
        return [(beam, entry, rank) for _, beam, entry, rank in found[: self._width]]

    def _candidates(self) -> Iterator[tuple[_Beam, _Entry, int]]:
        for beam in self._beams:
            entry = self._entries[beam.place]
            for rank in range(self.settings.num_candidates):
                yield beam, entry, rank

    def _complete(self, beam: _Beam, entry: _Entry, rank: int, stop_token: int | None) -> None:
        """Keep an answer if it is among the best; of equals the earlier stays before the later."""
        cumulative = beam.cumulative + entry.logprobs[rank]
        score = self._score(cumulative, self._length)
        if len(self.answers) == self._width and score <= self.answers[-1].score:
            return
        path = _Token(beam.path, entry.tokens[rank], entry.logprobs[rank], rank + 1, entry)
        self.answers.append(Answer(path, cumulative, score, stop_token))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self._width :]

    def _score(self, cumulative: float, length: int) -> float:
        return float(cumulative / length**self.settings.length_penalty)

    def _settled(self, chosen: list[tuple[_Beam, _Entry, int]]) -> bool:
        """No beam can still give a better answer than the worst there is: log-probabilities only add up."""
        beam, entry, rank = chosen[0]
        longest = self._limit if self.settings.length_penalty >= 0 else self._length
        return self._score(beam.cumulative + entry.logprobs[rank], longest) <= self.answers[-1].score

    def _follow(self, chosen: list[tuple[_Beam, _Entry, int]]) -> list[Step]:
        """The first child of a beam stays where its parent is, so that most need not move; the others take the rest."""
        free = set(range(self._width)) - {beam.place for beam, _, _ in chosen}
        spare = iter(sorted(free))
        stayed: set[int] = set()
        steps = []
        beams = []
        for beam, entry, rank in chosen:
            place = beam.place
            if place in stayed:
                place = next(spare)
            stayed.add(place)
            token, logprob = entry.tokens[rank], entry.logprobs[rank]
            steps.append(Step(place, beam.place, token))
            beams.append(_Beam(place, beam.cumulative + logprob, _Token(beam.path, token, logprob, rank + 1, entry)))
        self._beams = beams
        return steps
