"""The model runner: one plan in, one result out."""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.rope_kv_write.kv_write import host_kv_rows
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_table import PlanError, RowTable
from troupellm.models.batch.spans import NO_SPANS, Spans, last_places
from troupellm.models.batch.step_result import Histories, step_result
from troupellm.models.config.pooling_config import Activation
from troupellm.models.layers.attention_backend import plan_attention
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.layers.forward_batch import ForwardBatch, GroupBatch
from troupellm.models.runner.fused_decode import compiled_decode
from troupellm.models.runner.poison import Poison
from troupellm.models.runner.pooler import Pooler
from troupellm.models.sampling.logits_processors import Processors
from troupellm.models.sampling.logprobs import prompt_logprobs
from troupellm.models.sampling.masks import TokenMasks
from troupellm.models.sampling.sampler import Sampled, Sampler
from troupellm.models.speculation.speculator import MakeSpeculator
from troupellm.models.speculation.verify import Verification
from troupellm.models.speculation.verify_batch import VerifyBatch
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

PIECE_TOKENS = 512
"""Tokens that go through the layers together: enough for full speed, few enough that activations stay in the caches."""


QUICK_SECONDS, QUICK_TOKENS = 0.005, 64
"""In steps within both limits, other threads that hold the interpreter can delay half a step. They get it while the
head is computed, which is most of a small model's step in one call. Longer steps do not keep them waiting."""


class ModelRunner:
    """Executes plans against one decoder and one KV cache. Calls come from one thread."""

    def __init__(
        self,
        decoder: RunnableDecoder,
        cache: KVCache,
        *,
        max_model_len: int,
        poison: Poison | None = None,
        processors: Processors | None = None,
        activation: Activation = "softmax",
        guides: GuidedRows | None = None,
        attention_backend: str = "auto",
        speculation: MakeSpeculator | None = None,
    ) -> None:
        """
        Args:
            poison: for debugging, reveals reads of unwritten memory.
            processors: plug-ins that rows may ask for.
            activation: applied to a classifier's logits.
            guides: for rows with a guide; without it there can be none.
            attention_backend: computes attention; auto is the first suitable one.
            speculation: makes the speculator; without it no row may be speculative.

        Raises:
            ConfigError: that back end does not support the model.
        """
        device = cache.storage.device
        self.attention = plan_attention(
            decoder.config, cache.block_size, decoder.dtype, backend=attention_backend, device=device,
            kv_dtype=cache.storage.dtype, batch_invariant=decoder.batch_invariant,
        )  # fmt: skip
        self.decoder, self.cache, self.poison, self.guides = decoder, cache, poison, guides
        self.rows = RowTable(
            max_model_len=max_model_len, block_size=cache.block_size, num_groups=len(cache.layout.windows)
        )
        self.sampler = Sampler(decoder.config.vocab_size, device, processors)
        self.pooler = Pooler(head=None if decoder.score is None else decoder.classify, activation=activation)
        """Knows rows by their slots."""
        self.speculator = None if speculation is None else speculation(self.rows, self.sampler.options, guides)
        self._quick = False
        plain = speculation is None and poison is None
        self.decode = compiled_decode(self) if plain else None
        """Computes steps of which nothing more is asked."""

    @property
    def num_drafts(self) -> int:
        """Drafts of the last step; the next one will have about as many."""
        return 0 if self.speculator is None else self.speculator.num_drafts

    @torch.inference_mode()
    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Compute one step and append the sampled tokens to their rows.

        Args:
            meanwhile: called before a part of the step that leaves the interpreter to others; not at all by a
                step without rows.

        Raises:
            PlanError: the plan contradicts earlier plans; nothing was computed.
        """
        begin = perf_counter()
        self._apply(plan)
        if not plan.rows:
            self._follow(plan, NO_SPANS)
            return step_result(plan, None, np.zeros(0, dtype=bool), (), StepTimings())
        if self.decode is not None and (decoded := self.decode.run(plan, meanwhile)) is not None:
            return decoded
        starts, counts = np.array(plan.starts, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
        whole = Spans(np.arange(len(plan.rows)), self.rows.slots_of(plan, starts, counts), starts, counts)
        verify_batch: VerifyBatch | None = None
        if self.speculator is not None and not self.speculator.passes(whole.slots, starts, starts + counts):
            verify_batch = self.speculator.begin(plan, whole.slots, starts, counts)
            whole = verify_batch.spans
            if not whole.slots.size:
                return step_result(plan, None, np.zeros(len(plan.rows), dtype=bool), (), StepTimings())
        self._follow(plan, whole)
        ends, lengths = whole.starts + whole.counts, self.rows.lengths[whole.slots]
        pooled = self.rows.pooled[whole.slots] > 0
        sampling = (ends >= lengths) & ~pooled
        check: Verification | None = None
        if self.speculator is not None and verify_batch is not None and verify_batch.unusual(len(plan.rows)):
            check = Verification(plan, verify_batch, sampling, self.rows, self.sampler, self.guides, self.speculator)
        pieces = [(spans, self._batch(spans, verify_batch)) for spans in whole.pieces(PIECE_TOKENS)]
        # Only now, before a stretch that needs no interpreter, since the threads that fill masks need it.
        if check is not None:
            drawn, filled = check.drawn, check.begin_masks()
        else:
            drawn = [plan.rows[index] for index in np.flatnonzero(sampling).tolist()]
            filled = None if self.guides is None else self.guides.begin(drawn)
        prepared = perf_counter()
        late = self._quick and int(whole.counts.sum()) <= QUICK_TOKENS
        if meanwhile is not None and not late:
            meanwhile()
        last_hidden, about_prompts = [], []
        aux: list[Tensor] = []
        for spans, (batch, num_sampling) in pieces:
            hidden = self._forward(batch, aux)
            last_hidden.append(hidden[:num_sampling])
            about_prompts += self._prompt_logprobs(plan, spans, hidden[num_sampling:])
            self._pool(spans, hidden)
        hidden = last_hidden[0] if len(last_hidden) == 1 else torch.cat(last_hidden)
        if meanwhile is not None and late:
            meanwhile()
        logits = self.decoder.logits(hidden) if drawn else None
        computed = perf_counter()
        self._quick = computed - prepared < QUICK_SECONDS
        masks = None if self.guides is None or filled is None else self.guides.filled(filled)
        sampled, guided = None, None
        if check is not None:
            check.sample(logits, masks)
        elif logits is not None:
            sampled = self._sample(drawn, whole.slots[sampling], logits, masks)
        if self.guides is not None and masks is not None and sampled is not None:
            guided = report_tokens(self.guides, self.rows, drawn, whole.slots[sampling], sampled)
        if self.speculator is not None and verify_batch is not None:
            if check is None:
                self.speculator.finish_plain(verify_batch)
            elif verify_batch.trees:
                self._gather_paths(check)
            self.speculator.learn(verify_batch, {} if check is None else check.verdict, aux)
        vectors, unsound = self._finish_pooled(plan, whole, (ends == lengths) & pooled)
        timings = StepTimings(prepare=prepared - begin, forward=computed - prepared, sample=perf_counter() - computed)
        if check is not None:
            return check.result(about_prompts, vectors, unsound, timings)
        return step_result(plan, sampled, sampling, tuple(about_prompts), timings, vectors, unsound, guided)

    def _apply(self, plan: StepPlan) -> None:
        if self.speculator is None and max(plan.draft_limits, default=-1) >= 0:
            raise PlanError(f"step {plan.step}: drafts are not verified by this worker")
        for row in plan.freed_rows:
            if row in self.rows:
                self.pooler.drop_row(self.rows.slot(row))
                if self.speculator is not None:
                    self.speculator.drop_row(row)
            self.rows.drop(row)
            self.sampler.drop_row(row)
            if self.guides is not None:
                self.guides.drop(row)
        for new in plan.new_rows:
            if self.speculator is not None and new.row in self.rows:
                self.speculator.drop_row(new.row)
            known = self.rows.add(new)
            if new.pooling is not None:
                self.pooler.add_row(self.rows.slot(new.row), new.pooling)
                continue
            tokens, named = torch.from_numpy(known.copy()), new.embeddings is None
            self.sampler.add_row(new.row, new.sampling, tokens, new.num_prompt_tokens, known=named)
            self._guide(new, known)
            if self.speculator is not None:
                self.speculator.add_row(new)
        if plan.forks:
            self.rows.fork(plan.forks)
        for change in plan.changes:
            if change.dropped_blocks:
                self.rows.drop_blocks(change.row, change.dropped_blocks)
            self.rows.append_blocks(change.row, change.appended_blocks)
            if change.sampling is not None:
                self.rows.set_sampling(change.row, change.sampling)
                self.sampler.update_row(change.row, change.sampling)
        if plan.copies:
            self.cache.copy([(copy.source, copy.target) for copy in plan.copies])

    def _follow(self, plan: StepPlan, spans: Spans) -> None:
        """For debugging: poison the positions that are about to be computed."""
        if self.poison is not None:
            self.poison.follow(plan, self.rows, spans)

    def _guide(self, new: NewRow, known: NDArray[np.int32]) -> None:
        if self.guides is None:
            if new.sampling.guide is not None:
                raise PlanError(f"row {new.row}: this worker runs no guides")
        elif new.sampling.guide is None:
            self.guides.drop(new.row)
        else:
            self.guides.add(new.row, new.sampling, known[new.num_prompt_tokens :].tolist())

    def _batch(self, spans: Spans, verify_batch: VerifyBatch | None) -> tuple[ForwardBatch, int]:
        """Flatten spans, in a constant number of vector operations.

        Returns:
            the batch, and the number of logits to sample from. Those are its first logits; then come those of described
            prompts, then the positions to pool.
        """
        slots, starts, counts = spans.slots, spans.starts, spans.counts
        ends = np.cumsum(counts)
        owner, places, owning = np.arange(slots.size), starts, slots
        if ends[-1] > slots.size:
            owner = np.repeat(owner, counts)
            places, owning = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts), slots[owner]
        grown = verify_batch is not None and verify_batch.trees
        positions = verify_batch.positions(spans, places, owner) if verify_batch is not None and grown else places
        wanted, num_sampling = self._wanted(spans)
        batch = ForwardBatch(
            token_ids=self.rows.tokens_at(owning, places),
            positions=torch.from_numpy(positions),
            groups=self._groups(spans, owner, places, positions, verify_batch if grown else None),
            logit_tokens=torch.from_numpy(wanted),
            inputs=self._inputs(spans) if self.rows.embeddings else None,
        )
        return batch, num_sampling

    def _forward(self, batch: ForwardBatch, aux: list[Tensor]) -> Tensor:
        """Hidden states of the tokens that logits are wanted for. tapped: gets what the proposer is shown, if
        anything."""
        if self.speculator is None or not self.speculator.aux_hidden_states.shows:
            return self.decoder.forward(batch, self.cache.layers)
        hidden, shown = self.decoder.forward_with_aux(batch, self.cache.layers, self.speculator.aux_hidden_states)
        aux.append(shown)
        return hidden

    def _wanted(self, spans: Spans) -> tuple[NDArray[np.int64], int]:
        """The tokens of a flat batch with a result, and the number of them to sample from; see `_batch`."""
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
            *(np.arange(ends[row] - spans.counts[row], ends[row]) for row in self._with_prompt_logprobs(spans)),
            *(np.arange(first, first + count) for _, first, count in self._pooled(spans)),
        ]
        return np.concatenate(wanted), int(behind.sum())

    def _groups(
        self, spans: Spans, owner: NDArray[np.int64], places: NDArray[np.int64], positions: NDArray[np.int64],
        verify_batch: VerifyBatch | None,
    ) -> tuple[GroupBatch, ...]:  # fmt: skip
        """Where each view of the KV cache is written and read.

        Args:
            owner: [tokens] index of each token's span.
            places: [tokens] within the row's blocks.
            positions: [tokens] in the text.
            trial: where some of the rows have trees of drafts.
        """
        cache, layout = self.cache, self.cache.layout
        size, heads = cache.block_size, cache.num_kv_heads
        columns = places // size
        within = places - columns * size
        tables, rows = [], []
        for group in range(len(layout.windows)):
            table = self.rows.blocks[group, spans.slots, : int(columns.max()) + 1]
            if int(table.max(initial=0)) >= cache.num_blocks:
                raise PlanError(f"block {int(table.max())} of {cache.num_blocks} was named")
            blocks = table[owner, columns].astype(np.int64)
            if int(blocks.min()) < 0:
                raise PlanError("a position was planned behind the window of its row")
            tables.append(table)
            rows.append(host_kv_rows(blocks, within, heads, size))
        return tuple(
            GroupBatch(
                rows[view.group],
                self.attention(
                    tables[view.group], spans.starts, spans.counts, view.window,
                    None if verify_batch is None else verify_batch.tree(spans, places, owner, positions, view.window),
                ),
            )
            for view in layout.views
        )  # fmt: skip

    def _inputs(self, spans: Spans) -> tuple[Tensor, Tensor] | None:
        """Positions [places] with input embeddings instead of tokens, and the embeddings [places, hidden]."""
        places, values, begin = [], [], 0
        for slot, start, count in zip(spans.slots.tolist(), spans.starts.tolist(), spans.counts.tolist(), strict=True):
            given = self.rows.embeddings.get(slot)
            if given is not None and start < given.shape[0]:
                part = given[start : start + count]
                places.append(torch.arange(begin, begin + part.shape[0]))
                values.append(part)
            begin += count
        return (torch.cat(places), torch.cat(values)) if places else None

    def _sample(
        self, rows: Sequence[int], slots: NDArray[np.int64], logits: Tensor, masks: TokenMasks | None
    ) -> Sampled:
        """slots: of the rows that sample, in the order of `logits` [rows, vocab]."""
        lengths = self.rows.lengths[slots].tolist()
        histories = Histories(self.rows.tokens, slots.tolist(), lengths)
        sampled = self.sampler.sample(logits, rows, lengths, histories, masks)
        self.rows.append(slots, sampled.tokens)
        return sampled

    def _gather_paths(self, check: Verification) -> None:
        """Keys and values of the drafts that were kept lie behind each other from here on."""
        for sources, targets in check.moves(self.cache.block_size):
            self.cache.move(sources, targets)

    def _pooled(self, spans: Spans) -> list[tuple[int, int, int]]:
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

    def _pool(self, spans: Spans, hidden: Tensor) -> None:
        """hidden: of a whole batch, whose last part is to be pooled."""
        found = self._pooled(spans)
        if not found:
            return
        hidden = self._vectors(hidden[-sum(count for _, _, count in found) :])
        place = 0
        for slot, _, count in found:
            self.pooler.take(slot, hidden[place : place + count])
            place += count

    def _vectors(self, hidden: Tensor) -> Tensor:
        """Turn hidden states into the vectors to be pooled."""
        return self.decoder.normed(hidden)

    def _finish_pooled(
        self, plan: StepPlan, spans: Spans, ending: NDArray[np.bool_]
    ) -> tuple[list[RowPooled], list[RowError]]:
        if not len(self.pooler) or not ending.any():
            return [], []
        rows = [row for row, ends in zip(plan.rows, ending.tolist(), strict=True) if ends]
        return self.pooler.finish(spans.slots[ending].tolist(), rows)

    def _with_prompt_logprobs(self, spans: Spans) -> list[int]:
        """Indices of the rows that ask for prompt log-probabilities and compute prompt tokens that predict others."""
        if not self.rows.wants_prompt_logprobs:
            return []
        wants = self.rows.prompt_logprobs[spans.slots] >= 0
        return np.flatnonzero(wants & (spans.starts + 1 < self.rows.num_prompt_tokens[spans.slots])).tolist()

    def _prompt_logprobs(self, plan: StepPlan, spans: Spans, hidden: Tensor) -> list[RowLogprobs]:
        """hidden: the described rows' spans, one after the other."""
        found = []
        for index in self._with_prompt_logprobs(spans):
            count, slot, first = int(spans.counts[index]), int(spans.slots[index]), int(spans.starts[index]) + 1
            last = min(first + count, int(self.rows.num_prompt_tokens[slot]))
            row, width = plan.rows[int(spans.rows[index])], int(self.rows.prompt_logprobs[slot])
            for begin in range(first, last, PIECE_TOKENS):  # of a GPU's steps, which are not cut into pieces
                end = min(begin + PIECE_TOKENS, last)
                logits = self.decoder.logits(hidden[begin - first : end - first])
                found.append(prompt_logprobs(logits, row, begin, self.rows.tokens[slot, begin:end], width))
            hidden = hidden[count:]
        return found
