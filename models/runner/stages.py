"""The stages of a step that are the same on every device: apply, spans, masks, forward, sample and result.

A runner takes each plan through them in this order. Between the spans and the forward pass it makes the batch, which is
its device's own.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.short_conv.spans import ConvSpans, conv_spans
from troupellm.models.adapters.batch import AdapterBatch, HeadAdapters, adapter_batch
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.batch.host_device import to_device
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_table import PlanError, RowTable
from troupellm.models.batch.spans import NO_SPANS, Spans, last_places
from troupellm.models.batch.step_result import Histories, step_result
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.media.encoder_cache import EncoderCache, apply_media
from troupellm.models.runner.poison import Poison
from troupellm.models.runner.pooler import Pooler
from troupellm.models.runner.step import Step
from troupellm.models.sampling.logprobs import prompt_logprobs
from troupellm.models.sampling.masks import TokenMasks
from troupellm.models.sampling.sampler import Sampled, Sampler
from troupellm.models.speculation.speculator import Speculator
from troupellm.models.speculation.verify import Verification
from troupellm.models.structured_outputs.fill_masks import FilledLater
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.models.structured_outputs.report_tokens import report_tokens
from troupellm.protocol.messages.worker import (
    NewRow,
    RowError,
    RowLogprobs,
    RowPooled,
    StepPlan,
    StepResult,
    StepTimings,
)

LOGIT_TOKENS = 512
"""Prompt tokens whose logits are made together, where a step is not cut into pieces."""


class Stages:
    """A runner's state between steps, and the stages over it. Calls come from one thread."""

    def __init__(
        self,
        decoder: RunnableDecoder,
        cache: KVCache,
        rows: RowTable,
        sampler: Sampler,
        pooler: Pooler,
        *,
        poison: Poison | None,
        guides: GuidedRows | None,
        speculator: Speculator | None,
        adapters: AdapterSlots | None = None,
        asynchronous: bool = False,
    ) -> None:
        """
        Args:
            pooler: knows rows by their slots.
            adapters: None if no row may have one.
            asynchronous: the device computes by itself. Every step of a speculator goes by its verification then.
        """
        self.decoder, self.cache, self.rows, self.sampler, self.pooler = decoder, cache, rows, sampler, pooler
        self.poison, self.guides, self.speculator, self.adapters = poison, guides, speculator, adapters
        self.media: EncoderCache | None = None  # where images are encoded
        self._asynchronous = asynchronous
        self._device = cache.storage.device
        self._to_device = partial(to_device, device=self._device)

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's changes of rows, blocks and options.

        Raises:
            PlanError: it contradicts earlier plans.
        """
        if self.speculator is None and max(plan.draft_limits, default=-1) >= 0:
            raise PlanError(f"step {plan.step}: drafts are not verified by this worker")
        for row in plan.freed_rows:
            self._retire(row)
        for given in plan.adapters:
            if self.adapters is None or not self.adapters.fill(given.slot, given.digest):
                text = f"adapter {given.digest[:16]} is not prepared for slot {given.slot}"
                raise PlanError(f"step {plan.step}: {text}")
        if plan.encode or plan.forgotten:
            apply_media(self.media, plan)
        for new in plan.new_rows:
            self._add(new)
        if plan.forks:
            self.rows.fork(plan.forks)
        for change in plan.changes:
            if change.dropped_blocks:
                self.rows.drop_blocks(change.row, change.dropped_blocks)
            self.rows.append_blocks(change.row, change.appended_blocks)
            if change.sampling is not None:
                self.rows.set_sampling(change.row, change.sampling)
                self.sampler.update_row(change.row, change.sampling)
        if plan.states:
            if self.cache.states is None:
                raise PlanError(f"step {plan.step}: the model has no states to copy")
            self.cache.states.copy(plan.states)
        if plan.copies:
            self.cache.copy([(copy.source, copy.target) for copy in plan.copies])
        if self.rows.media:
            self.rows.pass_media(plan)

    def spans(self, plan: StepPlan, begin: float) -> Step:
        """The step of a plan that was applied: the positions of each row, drafts among them.

        Args:
            begin: seconds of `perf_counter`, when the plan was taken in hand.

        Raises:
            PlanError: the plan contradicts earlier plans; nothing was computed.
        """
        spans, verify_batch = NO_SPANS, None
        if plan.rows:
            starts, counts = np.array(plan.starts, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
            spans = Spans(np.arange(len(plan.rows)), self.rows.slots_of(plan, starts, counts), starts, counts)
            speculator = self.speculator
            if speculator is not None and self._asynchronous:
                speculator.rests(plan)
            if speculator is not None and (
                self._asynchronous or not speculator.passes(spans.slots, starts, starts + counts)
            ):
                verify_batch = speculator.begin(plan, spans.slots, starts, counts)
                spans = verify_batch.spans
        if self.poison is not None:
            self.poison.follow(plan, self.rows, spans)
        return Step(plan, begin, spans, verify_batch, *self.ending(spans))

    def ending(self, spans: Spans) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """The rows that draw a token and those whose vector is complete, by the tokens that are known now."""
        ends, lengths = spans.starts + spans.counts, self.rows.lengths[spans.slots]
        pooled = self.rows.pooled[spans.slots] > 0
        return (ends >= lengths) & ~pooled, (ends == lengths) & pooled

    def begin_masks(self, step: Step) -> None:
        """Lay out the logits that are drawn from, and begin the masks of guided rows among them."""
        plan, verify_batch, speculator = step.plan, step.verify_batch, self.speculator
        if (
            speculator is not None
            and verify_batch is not None
            and (self._asynchronous or verify_batch.unusual(len(plan.rows)))
        ):
            step.check = Verification(
                plan, verify_batch, step.sampling, self.rows, self.sampler, self.guides, speculator
            )
            step.drawn, step.filled = step.check.drawn, step.check.begin_masks()
        else:
            step.drawn = [plan.rows[index] for index in np.flatnonzero(step.sampling).tolist()]
            step.filled = None if self.guides is None else self.guides.begin(step.drawn)
        step.prepared = perf_counter()

    def forward(self, step: Step, batch: ForwardBatch) -> Tensor:
        """Hidden states of the tokens that `wanted` names."""
        if self.speculator is None or not self.speculator.aux_hidden_states.shows:
            return self.decoder.forward(batch, self.cache.layers)
        hidden, shown = self.decoder.forward_with_aux(batch, self.cache.layers, self.speculator.aux_hidden_states)
        step.aux.append(shown)
        return hidden

    def read_prompts(self, step: Step, spans: Spans, hidden: Tensor, num_sampling: int) -> None:
        """Take prompt log-probabilities and vectors from the hidden states that `wanted` names behind the first ones.

        Args:
            spans: of a piece of the step.
        """
        if self.rows.wants_prompt_logprobs:
            step.about_prompts += self._prompt_logprobs(step.plan, spans, hidden[num_sampling:])
        if len(self.pooler):
            self._pool(spans, hidden)

    def sample(self, step: Step, logits: Tensor | None) -> None:
        """Choose tokens, append them to their rows, and show them to the guides and the speculator.

        Args:
            logits: [drawn, vocab]; None where nothing is drawn.
        """
        step.computed = perf_counter()
        masks = None if step.filled is None else self._masks(step.filled)
        verify_batch, check = step.verify_batch, step.check
        if check is not None:
            check.sample(logits, masks)
        elif logits is not None:
            slots = step.spans.slots[step.sampling]
            step.sampled = self._draw(step.drawn, slots, logits, masks)
            if self.guides is not None and masks is not None:
                step.guided = report_tokens(self.guides, self.rows, step.drawn, slots, step.sampled)
        if self.speculator is None or verify_batch is None:
            return
        if check is None:
            self.speculator.finish_plain(verify_batch)
        elif verify_batch.trees:
            for group, (sources, targets) in enumerate(check.moves(self.cache.block_size)):
                self.cache.move(group, sources, targets)  # kept drafts lie behind each other from here on
        self.learn(step)

    def plain(self, step: Step) -> bool:
        """True if a speculator that may draft has found nothing, and needs to see nothing, in a step of all rows."""
        speculator, verify_batch = self.speculator, step.verify_batch
        if speculator is None or verify_batch is None or speculator.watches:
            return False
        return not verify_batch.unusual(len(step.plan.rows))

    def learn(self, step: Step) -> None:
        """Show a step that is done to the speculator, where it may have had drafts."""
        if self.speculator is not None and step.verify_batch is not None:
            self.speculator.learn(step.verify_batch, {} if step.check is None else step.check.verdict, step.aux)

    def result(self, step: Step) -> StepResult:
        """The step's result as plain data."""
        vectors, unsound = self._vectors(step) if len(self.pooler) and step.pooling.any() else ((), ())
        prepare, forward = step.prepared - step.begin, step.computed - step.prepared
        timings = StepTimings(prepare=prepare, forward=forward, sample=perf_counter() - step.computed)
        if step.check is not None:
            return step.check.result(step.about_prompts, vectors, unsound, timings)
        about = tuple(step.about_prompts)
        return step_result(step.plan, step.sampled, step.sampling, about, timings, vectors, unsound, step.guided)

    def wanted(self, spans: Spans) -> tuple[NDArray[np.int64], int]:
        """The tokens of a flat batch whose hidden states are wanted, and the number of them to sample from.

        Those to sample from come first, then those of prompts with log-probabilities, then those to pool.
        """
        slots, ends = spans.slots, np.cumsum(spans.counts)
        if slots.size and ends[-1] == slots.size and not self.rows.wants_prompt_logprobs and not len(self.pooler):
            last = np.flatnonzero(spans.starts + 1 >= self.rows.lengths[slots])
            return last, last.size
        # Of a row that samples: its last token, and the drafts behind it.
        behind = np.minimum(spans.starts + spans.counts - self.rows.lengths[slots] + 1, spans.counts)
        behind[(behind < 0) | (self.rows.pooled[slots] > 0)] = 0
        sampling = behind > 0
        wanted = [
            ends[sampling] - 1 if behind.max(initial=0) < 2 else last_places(ends, behind),
            *(np.arange(ends[row] - spans.counts[row], ends[row]) for row in self.with_prompt_logprobs(spans)),
            *(np.arange(first, first + count) for _, first, count in self.pooled(spans)),
        ]
        return np.concatenate(wanted), int(behind.sum())

    def adapted(self, spans: Spans, owner: NDArray[np.int64]) -> AdapterBatch | None:
        """The adapters of a flat batch; None where every row computes with the base model.

        Args:
            owner: [tokens] index of each token's span.
        """
        slots = self.adapters
        if slots is None or not (self.rows.adapted or self.decoder.batch_invariant):
            return None
        of_rows, invariant = self.rows.adapters[spans.slots], self.decoder.batch_invariant
        if not (invariant or of_rows.any()):  # an invariant row goes the same way beside any others
            return None
        return adapter_batch(slots, of_rows[owner], self.wanted(spans)[0], self._to_device, invariant=invariant)

    def states(self, spans: Spans) -> ConvSpans:
        """The rows of a flat batch and their state slots, for the layers that have states."""
        slots = self.rows.states[spans.slots]
        assert self.cache.states is not None
        if not 0 <= int(slots.min()) <= int(slots.max()) < self.cache.states.num_slots:
            raise PlanError(f"state slots {slots.min()} to {slots.max()} of {self.cache.states.num_slots} were named")
        return conv_spans(torch.from_numpy(slots), torch.from_numpy(spans.counts), self.cache.states.taps)

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Scores of the vocabulary, float32 [rows, vocab], of hidden states of these rows."""
        slots = self.adapters
        if slots is None or not self.rows.adapted:
            return self.decoder.logits(hidden)
        of_rows = self.rows.adapters[[self.rows.slot(row) for row in rows]]
        add = HeadAdapters.of(slots, of_rows, self._to_device, invariant=self.decoder.batch_invariant)
        return self.decoder.logits(hidden, add_adapters=add)

    def inputs(self, spans: Spans) -> tuple[Tensor, Tensor] | None:
        """Positions [places] with input embeddings instead of tokens, and the embeddings [places, hidden]."""
        places, values, begin = [], [], 0
        for slot, start, count in zip(spans.slots.tolist(), spans.starts.tolist(), spans.counts.tolist(), strict=True):
            given = self.rows.embeddings.get(slot)
            if given is not None and start < given.shape[0]:
                part = given[start : start + count]
                places.append(torch.arange(begin, begin + part.shape[0]))
                values.append(part if self.media is None else self._to_device(part))  # those of images are there
            if self.media is not None and slot in self.rows.media:
                for own, vectors in self.media.within(self.rows.media[slot], start, count):
                    places.append(own + begin)
                    values.append(vectors)
            begin += count
        return (torch.cat(places), torch.cat(values)) if places else None

    def with_prompt_logprobs(self, spans: Spans) -> list[int]:
        """Indices of the rows that ask for prompt log-probabilities and compute prompt tokens that predict others."""
        if not self.rows.wants_prompt_logprobs:
            return []
        wants = self.rows.prompt_logprobs[spans.slots] >= 0
        return np.flatnonzero(wants & (spans.starts + 1 < self.rows.num_prompt_tokens[spans.slots])).tolist()

    def pooled(self, spans: Spans) -> list[tuple[int, int, int]]:
        """Of each row that is pooled: its slot, and its counted tokens in the batch, first one and number."""
        if not len(self.pooler):
            return []
        ends = np.cumsum(spans.counts)
        found = []
        for index in np.flatnonzero(self.rows.pooled[spans.slots]).tolist():
            slot, start, count = int(spans.slots[index]), int(spans.starts[index]), int(spans.counts[index])
            ending = start + count == self.rows.lengths[slot]
            first, kept = self.pooler.wanted(slot, start, count, ends=bool(ending))
            found.append((slot, int(ends[index]) - count + first, kept))
        return found

    def _retire(self, row: int) -> None:
        if row in self.rows:
            self.pooler.drop_row(self.rows.slot(row))
            if self.speculator is not None:
                self.speculator.drop_row(row)
        self.rows.drop(row)
        self.sampler.drop_row(row)
        if self.guides is not None:
            self.guides.drop(row)

    def _add(self, new: NewRow) -> None:
        if new.adapter and (self.adapters is None or not self.adapters.holds(new.adapter)):
            raise PlanError(f"row {new.row}: adapter slot {new.adapter} holds none")
        if self.speculator is not None and new.row in self.rows:
            self.speculator.drop_row(new.row)
        known = self.rows.add(new)
        if new.pooling is not None:
            self.pooler.add_row(self.rows.slot(new.row), new.pooling)
            return
        tokens, named = torch.from_numpy(known.copy()), new.embeddings is None
        self.sampler.add_row(new.row, new.sampling, tokens, new.num_prompt_tokens, known=named)
        if self.guides is None:
            if new.sampling.guide is not None:
                raise PlanError(f"row {new.row}: this worker runs no guides")
        elif new.sampling.guide is None:
            self.guides.drop(new.row)
        else:
            self.guides.add(new.row, new.sampling, known[new.num_prompt_tokens :].tolist())
        if self.speculator is not None:
            self.speculator.add_row(new)

    def _masks(self, filled: FilledLater) -> TokenMasks:
        """Wait for masks; on the logits' device."""
        assert self.guides is not None
        masks, device = self.guides.filled(filled), self._device
        if device.type == "cpu":
            return masks
        return replace(masks, index=to_device(masks.index, device), bits=to_device(masks.bits, device))

    def _draw(self, rows: Sequence[int], slots: NDArray[np.int64], logits: Tensor, masks: TokenMasks | None) -> Sampled:
        """slots: of the rows that sample, in the order of `logits` [rows, vocab]."""
        lengths = self.rows.lengths[slots].tolist()
        histories = Histories(self.rows.tokens, slots.tolist(), lengths)
        sampled = self.sampler.sample(logits, rows, lengths, histories, masks)
        self.rows.append(slots, sampled.tokens)
        return sampled

    def _pool(self, spans: Spans, hidden: Tensor) -> None:
        """hidden: of a whole batch, whose last part is to be pooled, on the host."""
        found = self.pooled(spans)
        if not found:
            return
        hidden = self.decoder.normed(hidden[-sum(count for _, _, count in found) :]).cpu()
        place = 0
        for slot, _, count in found:
            self.pooler.take(slot, hidden[place : place + count])
            place += count

    def _vectors(self, step: Step) -> tuple[Sequence[RowPooled], Sequence[RowError]]:
        slots = step.spans.slots[step.pooling]
        rows = [step.plan.rows[index] for index in step.spans.rows[step.pooling].tolist()]
        return self.pooler.finish(slots.tolist(), rows)

    def _prompt_logprobs(self, plan: StepPlan, spans: Spans, hidden: Tensor) -> list[RowLogprobs]:
        """hidden: the spans of the rows with prompt log-probabilities, one after the other."""
        found = []
        for index in self.with_prompt_logprobs(spans):
            count, slot, first = int(spans.counts[index]), int(spans.slots[index]), int(spans.starts[index]) + 1
            last = min(first + count, int(self.rows.num_prompt_tokens[slot]))
            row, width = plan.rows[int(spans.rows[index])], int(self.rows.prompt_logprobs[slot])
            for begin in range(first, last, LOGIT_TOKENS):
                end = min(begin + LOGIT_TOKENS, last)
                logits = self.logits(hidden[begin - first : end - first], (row,) * (end - begin))
                found.append(prompt_logprobs(logits, row, begin, self.rows.tokens[slot, begin:end], width))
            hidden = hidden[count:]
        return found


def empty_result(plan: StepPlan) -> StepResult:
    """The result of a plan none of whose rows computes anything."""
    return step_result(plan, None, np.zeros(len(plan.rows), dtype=bool), (), StepTimings())
