"""The model runner of a CPU: one plan in, one result out."""

from collections.abc import Callable, Sequence
from time import perf_counter

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.fused_decoder.step import DecodeStep, Ends, decode_step
from troupellm.kernels.paged_attention.backends import Planner
from troupellm.kernels.rope_kv_write.kv_write import host_kv_rows
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.batch.chunks import in_chunks
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_table import PlanError, RowTable
from troupellm.models.batch.spans import Spans
from troupellm.models.batch.step_result import step_result
from troupellm.models.config.pooling_config import Activation
from troupellm.models.layers.attention_backend import plan_attention
from troupellm.models.layers.decoder import Decoder, RunnableDecoder
from troupellm.models.layers.forward_batch import ForwardBatch, GroupBatch
from troupellm.models.runner.poison import Poison
from troupellm.models.runner.pooler import Pooler
from troupellm.models.runner.stages import Stages, empty_result
from troupellm.models.runner.step import Step
from troupellm.models.sampling.logits_processors import Processors
from troupellm.models.sampling.sampler import Sampled, Sampler
from troupellm.models.speculation.speculator import MakeSpeculator
from troupellm.models.speculation.verify_batch import VerifyBatch
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.protocol.messages.worker import StepPlan, StepResult, StepTimings

PIECE_TOKENS = 512
"""Tokens that go through the layers together: enough for full speed, few enough that activations stay in the caches."""
QUICK_SECONDS, QUICK_TOKENS = 0.005, 64
"""In steps within both limits, other threads that hold the interpreter can delay half a step. They get it while the
head is computed, which is most of a small model's step in one call. Longer steps do not keep them waiting."""


class ModelRunner:
    """Executes plans against one decoder and one KV cache. Calls come from one thread.

    All forms of a step, and how `CudaRunner` computes the same. A GPU's steps are collected later, except those that
    the host looks into: these are computed to their end at launch ("at once"). In a step with rows of several forms,
    the last of them applies.

    | rows                               | here, on a CPU                           | on a GPU                         |
    |------------------------------------|------------------------------------------|----------------------------------|
    | one token each, plain draws        | one compiled call, `CompiledDecode`      | a graph that appends the tokens  |
    | one token each, sampling options   | pieces of 512 tokens, then one `Sampler` | a graph to the logits, `Chooser` |
    | prompts                            | the same                                 | kernel by kernel, `Chooser`      |
    | guides                             | masks are filled during the forward pass | chosen later, by `LateChoices`   |
    | plug-ins, thinking limits, phrases | as sampling options                      | at once, by `Sampler`            |
    | prompt log-probabilities, pooling  | read after each piece                    | at once, without a graph         |
    | adapters                           | all layers in one call, then `Sampler`   | graphs of their own              |
    | a speculator, no row has drafts    | as without one, unless states are shown  | at once, as with drafts          |
    | drafts                             | `Verification`: a draw after each draft  | at once; a graph if they are few |
    """

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
        adapters: AdapterSlots | None = None,
    ) -> None:
        """
        Args:
            poison: for debugging, reveals reads of unwritten memory.
            processors: plug-ins that rows may ask for.
            activation: applied to a classifier's logits.
            guides: for rows with a guide; without it there can be none.
            attention_backend: computes attention; auto is the first suitable one.
            speculation: makes the speculator; without it no row may be speculative.
            adapters: the slots that rows may name; without them no row may have an adapter.

        Raises:
            ConfigError: that back end does not support the model.
        """
        device = cache.storage.device
        self.attention = plan_attention(
            decoder.config,
            cache.block_size,
            decoder.dtype,
            backend=attention_backend,
            device=device,
            kv_dtype=cache.storage.dtype,
            batch_invariant=decoder.batch_invariant,
        )
        self._plans = [self.attention.with_heads(*msgspec.structs.astuple(view.heads)) for view in cache.layout.views]
        self._reads_on = decoder.config.num_writing < decoder.config.num_layers
        groups = len(cache.layout.windows)
        rows = RowTable(max_model_len=max_model_len, block_size=cache.block_size, num_groups=groups)
        sampler = Sampler(decoder.config.vocab_size, device, processors)
        head = None if decoder.score is None else decoder.classify
        self.decoder, self.cache, self.rows, self.poison, self.guides = decoder, cache, rows, poison, guides
        self.speculator = None if speculation is None else speculation(rows, sampler.options, guides)
        self.stages = Stages(
            decoder,
            cache,
            rows,
            sampler,
            Pooler(head=head, activation=activation),
            poison=poison,
            guides=guides,
            speculator=self.speculator,
            adapters=adapters,
        )
        self._quick = False
        plain = poison is None and not (adapters is not None and decoder.batch_invariant)
        self.decode = compiled_decode(decoder, cache, self.attention, rows, sampler) if plain else None
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
        begin, stages, speculator = perf_counter(), self.stages, self.speculator
        stages.apply(plan)
        if plan.rows and (speculator is None or speculator.rests(plan)):
            decoded = None if self.decode is None else self.decode.run(plan, meanwhile)
            if decoded is not None:
                return decoded
        step = stages.spans(plan, begin)
        if not step.spans.slots.size:
            return empty_result(plan)
        if self.decode is not None and stages.plain(step) and (decoded := self.decode.run(plan, meanwhile)) is not None:
            stages.learn(step)
            return decoded
        pieces = [(spans, *self._batch(spans, step.verify_batch)) for spans in step.spans.pieces(PIECE_TOKENS)]
        # Only now, before a stretch that needs no interpreter, since the threads that fill masks need it.
        stages.begin_masks(step)
        logits = self._forward(step, pieces, meanwhile)
        stages.sample(step, logits)
        self._quick = step.computed - step.prepared < QUICK_SECONDS
        return stages.result(step)

    def _forward(
        self, step: Step, pieces: Sequence[tuple[Spans, ForwardBatch, int]], meanwhile: Callable[[], None] | None
    ) -> Tensor | None:
        """The logits of the tokens to sample from, None if there are none.

        Args:
            pieces: spans, their batch, and the number of their tokens to sample from.
        """
        late = self._quick and int(step.spans.counts.sum()) <= QUICK_TOKENS
        if meanwhile is not None and not late:
            meanwhile()
        drawing = []
        for spans, batch, num_sampling in pieces:
            hidden = self.forward(step, spans, batch)
            drawing.append(hidden[:num_sampling])
            self.stages.read_prompts(step, spans, hidden, num_sampling)
        hidden = drawing[0] if len(drawing) == 1 else torch.cat(drawing)
        if meanwhile is not None and late:
            meanwhile()
        return self.stages.logits(hidden, step.drawn) if step.drawn else None

    def forward(self, step: Step, spans: Spans, batch: ForwardBatch) -> Tensor:
        """Hidden states of the tokens of a batch that `Stages.wanted` names. spans: of the batch."""
        return self.stages.forward(step, batch)

    def _batch(self, spans: Spans, verify_batch: VerifyBatch | None) -> tuple[ForwardBatch, int]:
        """Flatten spans, in a constant number of vector operations.

        Returns:
            the batch, and the number of logits to sample from; see `Stages.wanted`.
        """
        slots, starts, counts = spans.slots, spans.starts, spans.counts
        ends = np.cumsum(counts)
        owner, places, owning = np.arange(slots.size), starts, slots
        if ends[-1] > slots.size:
            owner = np.repeat(owner, counts)
            places, owning = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts), slots[owner]
        grown = verify_batch is not None and verify_batch.trees
        positions = verify_batch.positions(spans, places, owner) if verify_batch is not None and grown else places
        wanted, num_sampling = self.stages.wanted(spans)
        batch = ForwardBatch(
            token_ids=self.rows.tokens_at(owning, places),
            positions=torch.from_numpy(positions),
            groups=self._groups(spans, owner, places, positions, verify_batch if grown else None),
            logit_tokens=torch.from_numpy(wanted),
            inputs=self.stages.inputs(spans) if self.rows.has_inputs else None,
            adapters=self.stages.adapted(spans, owner),
            states=None if self.cache.states is None else self.stages.states(spans),
            reading=self._reading(spans, owner, places, wanted) if self._reads_on and not grown else None,
        )
        return batch, num_sampling

    def _reading(
        self, spans: Spans, owner: NDArray[np.int64], places: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> tuple[GroupBatch, ...] | None:
        """The keys that some tokens see, each token as a row of its own: for layers that write no keys.

        Args:
            owner: [tokens] index of each token's span.
            places: [tokens] within the row's blocks.
            wanted: [some] of the tokens.
        """
        if not 0 < wanted.size < places.size:
            return None
        starts, slots = places[wanted], spans.slots[owner[wanted]]
        width, counts, none = int(starts.max()) // self.cache.block_size + 1, np.ones_like(starts), torch.empty(0)
        found = []
        for view, plan in zip(self.cache.layout.views, self._plans, strict=True):
            rows = self.rows.blocks[view.group, slots, :width] * view.stride, starts, counts
            if view.chunk is not None:
                rows = in_chunks(*rows, view.chunk, self.cache.block_size)
            found.append(GroupBatch(none, plan(*rows, view.window)))
        return tuple(found)

    def _groups(
        self,
        spans: Spans,
        owner: NDArray[np.int64],
        places: NDArray[np.int64],
        positions: NDArray[np.int64],
        verify_batch: VerifyBatch | None,
    ) -> tuple[GroupBatch, ...]:
        """Where each view of the KV cache is written and read.

        Args:
            owner: [tokens] index of each token's span.
            places: [tokens] within the row's blocks.
            positions: [tokens] in the text.
            verify_batch: where some of the rows have trees of drafts.
        """
        cache, layout, size = self.cache, self.cache.layout, self.cache.block_size
        columns = places // size
        within = places - columns * size
        tables, held = [], []
        for group in range(len(layout.windows)):
            table = self.rows.blocks[group, spans.slots, : int(columns.max()) + 1]
            if int(table.max(initial=0)) >= cache.num_blocks:
                raise PlanError(f"block {int(table.max())} of {cache.num_blocks} was named")
            blocks = table[owner, columns].astype(np.int64)
            if int(blocks.min()) < 0:
                raise PlanError("a position was planned behind the window of its row")
            tables.append(table)
            held.append(blocks)
        rows: dict[tuple[int, int, int], Tensor] = {}
        found = []
        for view, plan in zip(layout.views, self._plans, strict=True):
            table, blocks = tables[view.group], held[view.group]
            if view.stride > 1:
                table, blocks = table * view.stride, blocks * view.stride
            place = view.group, view.stride, view.heads.num_kv_heads
            if place not in rows:
                rows[place] = host_kv_rows(blocks, within, view.heads.num_kv_heads, size)
            tree = None if verify_batch is None else verify_batch.tree(spans, places, owner, positions, view.window)
            starts, counts = spans.starts, spans.counts
            if view.chunk is not None:
                table, starts, counts = in_chunks(table, starts, counts, view.chunk, size)
            found.append(GroupBatch(rows[place], plan(table, starts, counts, view.window, tree)))
        return tuple(found)


class CompiledDecode:
    """Runs a step in which every row decodes one token as a single compiled call.

    Every row goes on from its last token, and asks for nothing but a draw from the whole vocabulary or the likeliest
    token.
    """

    def __init__(self, step: DecodeStep, rows: RowTable, sampler: Sampler) -> None:
        self._step, self._rows, self._sampler = step, rows, sampler
        self._ones: tuple[int, ...] = ()

    @property
    def logits(self) -> Tensor:
        """The logits of the last step, as the first rows [.., vocab]."""
        return self._step.logits

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult | None:
        """Compute a plan that was applied and append the tokens to their rows. None where it asks for another kind of
        step, or contradicts what is known: nothing was computed then.

        Args:
            meanwhile: as of `ModelRunner.run`.

        Raises:
            PlanError: an unknown row, or another epoch.
        """
        if not self._takes(plan):
            return None
        slots, plain = self._rows.places(plan), self._sampler.plain
        if self._rows.adapted and self._rows.adapters[slots].any():
            return None
        options = plain.slots(plan.rows)
        if options is None:
            return None
        if meanwhile is not None:
            meanwhile()
        begin = perf_counter()
        tokens = self._step.run(self._rows.memory, plain.columns, slots, options, plan.starts)
        if tokens is None:
            return None
        timings = StepTimings(forward=perf_counter() - begin)
        if min(tokens) < 0:
            peaks = torch.from_numpy(self._step.peaks[: len(tokens)].copy())
            positions = tuple(start + 1 for start in plan.starts)
            sampled = Sampled(torch.tensor(tokens), plan.rows, positions, peaks, (), {}, {})
            return step_result(plan, sampled, np.ones(len(tokens), dtype=bool), (), timings)
        return StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=plan.counts,
            tokens=tuple(tokens),
            timings=timings,
        )

    def _takes(self, plan: StepPlan) -> bool:
        """True if each row has one token, and none needs embeddings, prompt log-probabilities, pooling or a guide."""
        if self._rows.unusual:
            return False
        count = len(plan.rows)
        if len(self._ones) != count:
            self._ones = (1,) * count
        return count <= self._step.most_rows and plan.counts == self._ones


def compiled_decode(
    decoder: RunnableDecoder, cache: KVCache, attention: Planner, rows: RowTable, sampler: Sampler
) -> CompiledDecode | None:
    """None if some part of the model, or of a step, has no compiled form."""
    if not isinstance(decoder, Decoder) or decoder.together is None or decoder.head is None:
        return None
    config = decoder.config
    if not attention.compiled or config.logit_scale != 1.0 or config.logit_softcap:
        return None
    if any(view.chunk is not None for view in cache.layout.views):
        return None
    if decoder.head.out_features != config.vocab_size:  # this rank has a part of it
        return None
    table = decoder.embedding.blocks or decoder.embedding.table
    assert table is not None
    ends = Ends(table, decoder.embedding_scale, decoder.norm, config.rms_norm_eps, decoder.head)
    views = [(view.group, view.window or 0) for view in cache.layout.views]
    step = decode_step(decoder.together, decoder.tables, cache.layers, ends, views, sampler.codes)
    return None if step is None else CompiledDecode(step, rows, sampler)
