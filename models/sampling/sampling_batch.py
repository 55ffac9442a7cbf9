"""The sampling options of a step's rows as tensors: built when the set of rows changes, reused while it stays.

`SamplingBatch` lays the `RowOptions` of a step's rows side by side. Nothing here refers to a row number of the worker,
so a row that left cannot be seen in a batch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from troupellm.kernels.sampling.truncate import Nucleus
from troupellm.models.sampling.logprobs import logprob_groups
from troupellm.models.sampling.row_options import RowOptions, valid_ids

SMALLEST_PENALTY = 1.2e-38
"""The least normal float32: a repetition penalty below it would round to 0 and make NaN of a masked logit."""


@dataclass(frozen=True)
class RandomRows:
    """The rows that draw. Tensors are parallel, [random rows] or [random rows, 1]."""

    index: Tensor
    streams: Tensor
    inverse_temperature: Tensor
    log_min_p: Tensor | None
    plain: Tensor | None
    """Rows that draw from the whole vocabulary, as indices into this table; None is all of them."""
    groups: tuple[tuple[Tensor, Nucleus, int], ...]
    """Rows with top_k or top_p, their limits, and the prefix that is looked at first."""


@dataclass(frozen=True)
class Choice:
    """Rows that take the likeliest token, and the options of the others."""

    greedy: Tensor | None
    """Indices of the former; None is all."""
    random: RandomRows | None


@dataclass(frozen=True)
class StopMask:
    """Stop tokens of rows with min_tokens, masked while the sequence is shorter than `min_lengths`. All [stops]."""

    rows: Tensor
    places: Tensor
    min_lengths: Tensor


@dataclass(frozen=True)
class BadWords:
    """Token sequences of two and more. Tensors are [words] or [words, longest prefix]."""

    rows: tuple[int, ...]
    text_of: Tensor
    """For each word, the index of its row in `rows`."""
    prefixes: Tensor
    places: Tensor


@dataclass(frozen=True)
class Penalties:
    """`rows` lists the penalised rows; the factors are float32 [penalised rows]."""

    rows: tuple[int, ...]
    rows_index: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    prompt_places: Tensor
    prompt_penalties: Tensor


class SamplingBatch:
    """A step's sampling rows, in the order of their logits."""

    def __init__(
        self, rows: Sequence[RowOptions], vocab: int, device: torch.device, choice: Choice | None = None
    ) -> None:
        """choice: where it is known already; then no row asks for more."""
        self.rows = tuple(rows)
        self._vocab = vocab
        self._device = device
        self._asking = [i for i, row in enumerate(rows) if not row.plain] if choice is None else []
        """Only those are looked at for the rest: where rows skip steps, another batch is made for each."""
        choice = self._choice() if choice is None else choice
        self.greedy, self.random = choice.greedy, choice.random
        self.logprob_groups = logprob_groups(rows, device) if self._asking else ()
        self.thinkers = tuple(i for i in self._asking if rows[i].thinking is not None)
        self.plugged = self._plugged()
        """(name, members, their index) per plug-in that a row asks for."""
        self.refused = tuple(i for i in self._asking if rows[i].refusal is not None)
        allowed = [i for i in self._asking if rows[i].allowed.numel()]
        self.allowed = (self._tensor(allowed), self._places((i, rows[i].allowed) for i in allowed)) if allowed else None
        """Rows, and the places that they allow."""
        self.added = self._added()
        """Places, and the numbers to add there."""
        self.stops = self._stop_mask()
        self.bad_words = self._bad_words()
        self.penalties = self._penalties()
        self.adjusted = (
            self.allowed is not None
            or self.added is not None
            or self.stops is not None
            or self.bad_words is not None
            or self.penalties is not None
            or bool(self.thinkers)
            or bool(self.plugged)
            or bool(self.refused)
        )
        """True if any row changes its logits before the temperature is applied."""

    @cached_property
    def prompt_lengths(self) -> tuple[int, ...]:
        return tuple(row.num_prompt_tokens for row in self.rows)

    def _choice(self) -> Choice:
        greedy = [i for i, row in enumerate(self.rows) if row.greedy]
        if len(greedy) == len(self.rows):
            return Choice(None, None)
        return Choice(self._tensor(greedy), self._random_rows())

    def _added(self) -> tuple[Tensor, Tensor] | None:
        members = [i for i in self._asking if self.rows[i].additions]
        if not members:
            return None
        places = self._places((i, valid_ids(self.rows[i].additions.keys(), self._vocab)) for i in members)
        return places, self._floats([value for i in members for value in self.rows[i].additions.values()])

    def _random_rows(self) -> RandomRows:
        index = [i for i, row in enumerate(self.rows) if not row.greedy]
        drawn = [self.rows[i] for i in index]
        plain = [i for i, row in enumerate(drawn) if row.prefix is None]
        groups = []
        for prefix in sorted({row.prefix for row in drawn if row.prefix is not None}):
            members = [i for i, row in enumerate(drawn) if row.prefix == prefix]
            top_k = self._tensor([drawn[i].top_k for i in members])[:, None]
            top_p = torch.tensor([drawn[i].state.top_p for i in members], dtype=torch.float64, device=self._device)
            groups.append((self._tensor(members), Nucleus(top_k, top_p[:, None]), prefix))
        log_min_p = [row.log_min_p for row in drawn]
        return RandomRows(
            index=self._tensor(index),
            streams=self._tensor([row.stream for row in drawn]),
            inverse_temperature=self._floats([row.inverse_temperature for row in drawn])[:, None],
            log_min_p=self._floats(log_min_p)[:, None] if max(log_min_p) > -math.inf else None,
            plain=None if len(plain) == len(drawn) else self._tensor(plain),
            groups=tuple(groups),
        )

    def _stop_mask(self) -> StopMask | None:
        members = [i for i in self._asking if self.rows[i].stops.numel()]
        if not members:
            return None
        places = self._places((i, self.rows[i].stops) for i in members)
        repeats = self._tensor([self.rows[i].stops.numel() for i in members])
        return StopMask(
            rows=_repeated(self._tensor(members), repeats, places),
            places=places,
            min_lengths=_repeated(self._tensor([self.rows[i].min_length for i in members]), repeats, places),
        )

    def _bad_words(self) -> BadWords | None:
        members = [i for i in self._asking if self.rows[i].words]
        if not members:
            return None
        words = [(text, i, word) for text, i in enumerate(members) for word in self.rows[i].words]
        longest = max(self.rows[i].longest_prefix for i in members)
        return BadWords(
            rows=tuple(members),
            text_of=self._tensor([text for text, _, _ in words]),
            prefixes=self._tensor([[-2] * (longest + 1 - len(word)) + list(word[:-1]) for _, _, word in words]),
            places=self._tensor([i * self._vocab + word[-1] for _, i, word in words]),
        )

    def _penalties(self) -> Penalties | None:
        members = [i for i in self._asking if self.rows[i].penalized]
        if not members:
            return None
        states = [self.rows[i].state for i in members]
        prompts = [self.rows[i].prompt_tokens for i in members]
        repetition = self._floats([max(state.repetition_penalty, SMALLEST_PENALTY) for state in states])
        places = self._places(zip(members, prompts, strict=True))
        return Penalties(
            rows=tuple(members),
            rows_index=self._tensor(members),
            repetition=repetition,
            frequency=self._floats([state.frequency_penalty for state in states]),
            presence=self._floats([state.presence_penalty for state in states]),
            prompt_places=places,
            prompt_penalties=_repeated(repetition, self._tensor([prompt.numel() for prompt in prompts]), places),
        )

    def _plugged(self) -> tuple[tuple[str, tuple[int, ...], Tensor], ...]:
        members: dict[str, list[int]] = {}
        for i in self._asking:
            asked = self.rows[i].processors
            if asked is not None:
                for name in asked.options:
                    members.setdefault(name, []).append(i)
        return tuple((name, tuple(indices), self._tensor(indices)) for name, indices in members.items())

    def _places(self, listed: Iterable[tuple[int, Tensor]]) -> Tensor:
        """Row numbers and token ids as flat places, in order."""
        return torch.cat([ids + row * self._vocab for row, ids in listed]).to(self._device)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


def _repeated(values: Tensor, times: Tensor, like: Tensor) -> Tensor:
    """Repeat each value `times` times. `like` has the size of the result, so that a GPU is not waited for."""
    return values.repeat_interleave(times, output_size=like.shape[0])
