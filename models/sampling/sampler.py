"""The batched sampler: logits in, one token per row out, in vLLM's order of operations.

Raw log-probabilities are taken first. Then, for the rows that ask for it: guides, allowed_token_ids, bad_words,
min_tokens, logit_bias, penalties, logits processors, the forced end of thinking, temperature, min_p, top_k, top_p,
draw. Only rows that use an option pay for it.

A row's token is a function of its own logits, options, history and position, down to the bit. It does not depend on the
other rows of the batch, on its row number, or on the previous row with that number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.sampling import cpu, draw, draw_truncated
from troupellm.kernels.sampling.adjust import (
    add_at,
    keep_bits,
    keep_only,
    matches,
    occurrence_penalty,
    repeat_penalty,
)
from troupellm.kernels.sampling.noise import position_keys, token_codes
from troupellm.kernels.sampling.search import row_argmax, row_best
from troupellm.models.sampling.logits_processors import ProcessedRow, Processors, apply_to
from troupellm.models.sampling.logprobs import SampledLogprobs
from troupellm.models.sampling.masks import TokenMasks
from troupellm.models.sampling.plain_batch import PlainRows
from troupellm.models.sampling.row_options import RowOptions
from troupellm.models.sampling.sampling_batch import BadWords, Penalties, RandomRows, SamplingBatch
from troupellm.protocol.errors import REFUSED
from troupellm.protocol.messages.worker import RowError, RowLogprobs, SamplingState

_BAD_LOGITS = "the model gave NaN or infinite logits for this sequence"
_ALL_MASKED = (
    "no token is left to choose from: allowed_token_ids, bad_words, min_tokens, logit_bias or a plug-in masks each"
)


@dataclass
class Sampled:
    """The result of `Sampler.sample`, in the order of its rows.

    `tokens` may be used on the device at once; reading `logprobs` or `errors` waits for the device.
    """

    tokens: Tensor
    """int64 [rows], on the logits' device. -1 marks a row that failed: it has an entry in `errors`, contributes no
    token and no log-probabilities, and the -1 must not be used as a token id."""
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    peaks: Tensor
    """Largest raw logit per row: NaN or infinite when the model failed."""
    logprob_parts: tuple[SampledLogprobs, ...]
    failures: Mapping[int, RowError]
    """By index: errors of rows that failed before anything was drawn for them."""
    reasons: Mapping[int, RowError]
    """By row index: the reason why a guided row has no token."""

    @cached_property
    def errors(self) -> list[RowError]:
        """One error per failed row."""
        return list(self.errors_by_index.values())

    @cached_property
    def errors_by_index(self) -> dict[int, RowError]:
        if min(self.values, default=0) >= 0:
            return {}
        failed = [i for i, token in enumerate(self.values) if token < 0]
        finite = self.peaks[failed].isfinite().tolist()
        return {
            i: self.failures.get(i)
            or (good and self.reasons.get(i))
            or RowError(self.rows[i], _ALL_MASKED if good else _BAD_LOGITS)
            for i, good in zip(failed, finite, strict=True)
        }

    @cached_property
    def values(self) -> list[int]:
        """The tokens on the host."""
        found: list[int] = self.tokens.tolist()
        return found

    @cached_property
    def logprobs(self) -> list[RowLogprobs]:
        """One entry per row that asked for them and did not fail."""
        failed = {error.row for error in self.errors} if self.logprob_parts else set()
        return [entry for part in self.logprob_parts for entry in part.entries(self.rows, self.positions, failed)]


class Sampler:
    """Samples for the rows that were added to it. Calls come from one thread."""

    def __init__(self, vocab_width: int, device: torch.device, processors: Processors | None = None) -> None:
        """
        Args:
            vocab_width: width of the logits.
            processors: plug-ins that rows may ask for.
        """
        self._processors = processors or {}
        self._vocab = vocab_width
        self._device = device
        self.codes = token_codes(vocab_width, device)
        self._compiled = cpu.compiled() if device.type == "cpu" else None
        self._rows: dict[int, RowOptions] = {}
        self.plain = PlainRows()
        self._batch: SamplingBatch | None = None
        self._batch_rows: tuple[int, ...] = ()

    def add_row(
        self,
        row: int,
        state: SamplingState,
        token_ids: Tensor | Sequence[int],
        num_prompt_tokens: int,
        *,
        known: bool = True,
    ) -> None:
        """Make a row known, or replace it: nothing of an earlier row of that number stays.

        Args:
            token_ids: every token known so far, prompt first; only the prompt is read, and copied.
            known: False where the prompt is embeddings, whose places the tokens only hold.
        """
        prompt = torch.tensor(token_ids[:num_prompt_tokens]) if not isinstance(token_ids, Tensor) else token_ids
        self._put(row, state, prompt[:num_prompt_tokens].detach().to("cpu", copy=True), known=known)

    def update_row(self, row: int, state: SamplingState) -> None:
        """Change the sampling state of a known row.

        Raises:
            KeyError: the row is not known.
        """
        self._put(row, state, self._rows[row].prompt, known=self._rows[row].known)

    def options(self, row: int) -> RowOptions:
        """The options of a known row."""
        return self._rows[row]

    def drop_row(self, row: int) -> None:
        """Forget a row; an unknown one is fine."""
        self._rows.pop(row, None)
        self.plain.drop(row)
        self._batch = None

    def _put(self, row: int, state: SamplingState, prompt: Tensor, *, known: bool) -> None:
        options = self._rows[row] = RowOptions(state, prompt, self._vocab, known=known, processors=self._processors)
        self.plain.put(row, options)
        self._batch = None

    def _batch_of(self, rows: tuple[int, ...]) -> SamplingBatch:
        if self._batch is None or self._batch_rows != rows:
            options = [self._rows[row] for row in rows]
            self._batch = SamplingBatch(options, self._vocab, self._device, self.plain.choice(rows, self._device))
            self._batch_rows = rows
        return self._batch

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        histories: Sequence[Tensor],
        masks: TokenMasks | None = None,
        sure: Sequence[int] | None = None,
    ) -> Sampled:
        """Choose each row's next token.

        Args:
            logits: [rows, vocab]; may be overwritten when it is contiguous float32.
            rows: known rows; one that has drafts stands here once for itself and once for each of them.
            positions: index in its sequence of the token being sampled.
            histories: int32 or int64 views of each row's tokens so far (prompt and generated); read up to the row's
                position, and only for rows whose options depend on their tokens.
                masks: the tokens that rows with a guide may draw.
            sure: how many tokens of each history are the row's; those behind are drafts. None: all.

        Raises:
            KeyError: a row is not known.
        """
        logits = logits.float().contiguous()
        if self._compiled is not None and (slots := self.plain.slots(rows)) is not None:
            guided, bits, reasons = (None, None, {}) if masks is None else (masks.index, masks.bits, masks.reasons)
            at = np.array(positions, dtype=np.int64)
            tokens, peaks = self._compiled.choose(logits, self.plain.columns, slots, at, self.codes, guided, bits)
            return Sampled(tokens, tuple(rows), tuple(positions), peaks, (), {}, reasons)
        batch = self._batch_of(tuple(rows))
        if batch.random is None and masks is None and not batch.adjusted and not batch.logprob_groups:
            tokens, peaks = row_best(logits)
            tokens = tokens.masked_fill_((peaks.abs() < torch.inf).logical_not_(), -1)
            return Sampled(tokens, tuple(rows), tuple(positions), peaks, (), {}, {})
        peaks = raw_peaks = logits.amax(-1)
        groups = batch.logprob_groups
        # The processing below works in place.
        raw = [group.raw(logits) for group in groups]
        if masks is not None:
            keep_bits(logits, masks.index, masks.bits)
        failures = self._adjust(batch, logits, positions, histories, sure) if batch.adjusted else {}
        if batch.adjusted or masks is not None:
            peaks = logits.amax(-1)
        scores = [
            group.drawn_from(logits) if given is None else given for group, given in zip(groups, raw, strict=True)
        ]
        tokens = self._choose(batch, logits, peaks, positions)
        usable = raw_peaks.isfinite() & peaks.isfinite()
        if failures:
            usable[list(failures)] = False
        logprob_parts = tuple([group.compute(given, tokens) for group, given in zip(groups, scores, strict=True)])
        tokens = tokens.masked_fill_(~usable, -1)
        reasons = {} if masks is None else masks.reasons
        return Sampled(tokens, tuple(rows), tuple(positions), raw_peaks, logprob_parts, failures, reasons)

    def _choose(self, batch: SamplingBatch, logits: Tensor, peaks: Tensor, positions: Sequence[int]) -> Tensor:
        """Tokens int64 [rows], any valid id for rows whose peak is not finite."""
        if batch.random is None:
            return row_argmax(logits)
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        if batch.greedy is not None and batch.greedy.numel():
            tokens[batch.greedy] = row_argmax(_rows(logits, batch.greedy))
        drawn = self._draw(batch.random, logits, peaks, positions)
        tokens[batch.random.index] = drawn.clamp_(0, self._vocab - 1)
        return tokens

    def _draw(self, random: RandomRows, logits: Tensor, peaks: Tensor, positions: Sequence[int]) -> Tensor:
        """Tokens int64 [random rows]."""
        if random.index.numel() < logits.shape[0]:
            logits, peaks = logits.index_select(0, random.index), peaks[random.index]
        # With its peak at 0 a row cannot overflow, however low the temperature.
        scaled = logits.sub_(peaks[:, None]).mul_(random.inverse_temperature)
        if random.log_min_p is not None:
            scaled.masked_fill_(scaled < random.log_min_p, -torch.inf)
        at = torch.tensor(positions, device=self._device)[random.index]
        keys = position_keys(random.streams, at)
        if random.plain is None:
            return draw(scaled, keys, self.codes)
        tokens = torch.zeros_like(at)
        if random.plain.numel():
            tokens[random.plain] = draw(_rows(scaled, random.plain), keys[random.plain], self.codes)
        for index, nucleus, prefix in random.groups:
            tokens[index] = draw_truncated(_rows(scaled, index), nucleus, keys[index], self.codes, prefix)
        return tokens

    def _adjust(
        self,
        batch: SamplingBatch,
        logits: Tensor,
        positions: Sequence[int],
        histories: Sequence[Tensor],
        sure: Sequence[int] | None,
    ) -> dict[int, RowError]:
        """Apply masks, bias, penalties, plug-ins and forced tokens, in place; returns the failed rows, by index."""
        if batch.allowed is not None:
            keep_only(logits, *batch.allowed)
        if batch.bad_words is not None:
            self._mask_bad_words(batch, batch.bad_words, logits, positions, histories)
        if batch.stops is not None:
            lengths = torch.tensor(positions, device=self._device)[batch.stops.rows]
            add_at(logits, batch.stops.places, _masked_where(lengths < batch.stops.min_lengths))
        if batch.added is not None:
            add_at(logits, *batch.added)
        if batch.penalties is not None:
            self._penalize(batch, batch.penalties, logits, positions, histories)
        failures = self._plug_in(batch, logits, positions, histories) if batch.plugged else {}
        for i in batch.refused:
            failures[i] = RowError(self._batch_rows[i], batch.rows[i].refusal or "", REFUSED)
        if batch.thinkers:
            self._force(batch, logits, positions, histories, positions if sure is None else sure)
        return failures

    def _plug_in(
        self, batch: SamplingBatch, logits: Tensor, positions: Sequence[int], histories: Sequence[Tensor]
    ) -> dict[int, RowError]:
        failures = {}
        for name, members, index in batch.plugged:
            rows = [
                ProcessedRow(batch.rows[i].plug_in_options(name), histories[i][: positions[i]], batch.prompt_lengths[i])
                for i in members
            ]
            for place, reason in apply_to(self._processors[name], name, logits, index, rows).items():
                failures[members[place]] = RowError(self._batch_rows[members[place]], reason)
        return failures

    def _force(
        self,
        batch: SamplingBatch,
        logits: Tensor,
        positions: Sequence[int],
        histories: Sequence[Tensor],
        sure: Sequence[int],
    ) -> None:
        """Rows that have thought enough get one token to choose from."""
        rows, tokens = [], []
        for i in batch.thinkers:
            watch = batch.rows[i].thinking
            assert watch is not None
            watch.feed(histories[i][watch.seen : sure[i]].tolist())
            if positions[i] > sure[i]:
                watch = watch.copy()
                watch.feed(histories[i][watch.seen : positions[i]].tolist())
            if watch.forced is not None:
                rows.append(i)
                tokens.append(watch.forced)
        if rows:
            logits[rows] = -torch.inf
            logits[rows, tokens] = 0.0

    def _mask_bad_words(
        self,
        batch: SamplingBatch,
        words: BadWords,
        logits: Tensor,
        positions: Sequence[int],
        histories: Sequence[Tensor],
    ) -> None:
        """Mask the last token of each word whose other tokens were generated last."""
        longest = words.prefixes.shape[1]
        tails = torch.full((len(words.rows), longest), -1, dtype=torch.int64, device=self._device)
        for text, row in enumerate(words.rows):
            tail = histories[row][max(batch.prompt_lengths[row], positions[row] - longest) : positions[row]]
            tails[text, longest - tail.numel() :] = tail
        add_at(logits, words.places, _masked_where(matches(tails[words.text_of], words.prefixes)))

    def _penalize(
        self,
        batch: SamplingBatch,
        penalties: Penalties,
        logits: Tensor,
        positions: Sequence[int],
        histories: Sequence[Tensor],
    ) -> None:
        outputs = [histories[row][batch.prompt_lengths[row] : positions[row]] for row in penalties.rows]
        lengths = torch.tensor([output.numel() for output in outputs], device=self._device)
        # A failed row may hold -1 as its last token, which as a place would lie in the row before.
        generated = torch.cat(outputs).long().clamp_(0, self._vocab - 1)
        owner = torch.arange(len(outputs), device=self._device)
        owner = owner.repeat_interleave(lengths, output_size=generated.shape[0])  # else a GPU is waited for
        places = penalties.rows_index[owner] * self._vocab + generated
        repeat_penalty(
            logits,
            torch.cat((penalties.prompt_places, places)),
            torch.cat((penalties.prompt_penalties, penalties.repetition[owner])),
        )
        counters = torch.zeros(len(outputs) * self._vocab, dtype=torch.float32, device=self._device)
        slots = owner * self._vocab + generated
        occurrence_penalty(logits, places, penalties.frequency[owner], penalties.presence[owner], counters, slots)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """The indexed rows of [rows, n]; no copy when they are all of them. An index is rising and without repeats."""
    return values if index.numel() == values.shape[0] else values.index_select(0, index)


def _masked_where(masked: Tensor) -> Tensor:
    return torch.zeros(masked.shape, dtype=torch.float32, device=masked.device).masked_fill_(masked, -torch.inf)
