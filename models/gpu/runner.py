"""The model runner of an asynchronous device: plans are launched, and their results are collected later."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.sampling.noise import token_codes
from troupellm.models.batch.host_device import to_device
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.spans import NO_SPANS, Spans
from troupellm.models.batch.step_result import step_result
from troupellm.models.config.pooling_config import Activation
from troupellm.models.gpu.batch import BatchMaker, DeviceSpans, GroupPlanner
from troupellm.models.gpu.cuda_graphs import DecodeGraphs
from troupellm.models.gpu.device import Device
from troupellm.models.gpu.draft_trees import device_trees, host_trees
from troupellm.models.gpu.graph_dispatch import BatchDescriptor, Dispatcher, GraphKey
from troupellm.models.gpu.guided_rows import LateChoices
from troupellm.models.gpu.host_transfer import Results, Staging
from troupellm.models.gpu.launched_step import Choice, LaunchedPlan
from troupellm.models.gpu.row_table import DeviceRows
from troupellm.models.gpu.sample import Chooser
from troupellm.models.gpu.sampling_tensors import ELSEWHERE, GREEDY, SamplingTensors
from troupellm.models.gpu.steps_in_flight import Flights
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.runner.poison import Poison
from troupellm.models.runner.pooler import Pooler
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.sampling.logits_processors import Processors
from troupellm.models.sampling.masks import TokenMasks
from troupellm.models.speculation.speculator import MakeSpeculator, Speculator
from troupellm.models.speculation.verify import Verification
from troupellm.models.speculation.verify_batch import VerifyBatch
from troupellm.models.structured_outputs.fill_masks import FilledLater
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.models.structured_outputs.report_tokens import report_tokens
from troupellm.protocol.messages.worker import MOST_LAUNCHED, RowLogprobs, StepPlan, StepResult, StepTimings

TURNS = MOST_LAUNCHED + 1


class CudaRunner(ModelRunner):
    """Executes plans on a device. Calls come from one thread; up to two plans are under way.

    A step is launched without any wait for the device; the choice of one with guided rows is launched when the tokens
    before it are known. One that the host looks into (for plug-ins, limits to thinking, banned words of several tokens,
    prompts' log-probabilities, pooling) is computed to its end when it is launched, and so is every step of a runner
    that speculates: what is drafted next depends on what was kept. Steps of few tokens per row have graphs there, too.
    """

    def __init__(
        self,
        decoder: RunnableDecoder,
        cache: KVCache,
        device: Device,
        *,
        max_model_len: int,
        plan: GroupPlanner,
        capture_sizes: tuple[int, ...] = (),
        slots: int = 16,
        poison: Poison | None = None,
        processors: Processors | None = None,
        activation: Activation = "softmax",
        guides: GuidedRows | None = None,
        attention_backend: str = "auto",
        speculation: MakeSpeculator | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """
        Args:
            cache: on the device; its last block is the null page, which no plan may name.
            capture_sizes: batch sizes that get a graph; none is to launch every kernel by itself.
            slots: rows that are known at once, to begin with; graphs are captured anew when there are more.
            clock: seconds, by which captures are rare beside steps.
            others: as `ModelRunner`.
        """
        super().__init__(
            decoder, cache, max_model_len=max_model_len, poison=poison, processors=processors, activation=activation,
            guides=guides, attention_backend=attention_backend,
        )  # fmt: skip
        self.device, self._staging = device, Staging(device, TURNS)
        self.rows: DeviceRows = DeviceRows(
            max_model_len=max_model_len, block_size=cache.block_size, num_groups=len(cache.layout.windows),
            device=device, staging=self._staging, slots=slots, null_page=cache.num_blocks - 1,
        )  # fmt: skip
        self.speculator = None if speculation is None else speculation(self.rows, self.sampler.options, guides)
        score = None if decoder.score is None else partial(_classified, decoder, device.torch_device)
        self.pooler = Pooler(head=score, activation=activation)
        self._columns = SamplingTensors()
        codes = token_codes(decoder.config.vocab_size, device.torch_device)
        self.chooser = Chooser(self._columns, codes, self.rows, self._staging)
        self._maker = BatchMaker(cache, plan)
        self._results = Results(device, TURNS, max(slots, 1))
        late = None if guides is None else LateChoices(guides, self.chooser, self.rows)
        self.flights = Flights(device, self._results, late, decoder.config.vocab_size)
        self._broken: Exception | None = None
        dispatcher, aux_hidden_states = Dispatcher(capture_sizes), None
        if self.speculator is not None:
            aux_hidden_states = self.speculator.aux_hidden_states
            dispatcher = Dispatcher(capture_sizes, queries=(1, 1 + self.speculator.most), draws=False)
        self._pads = set(cache.layout.windows) == {None}
        """Rows with few tokens may be filled up: all that lies before these is there still."""
        self.graphs = DecodeGraphs(
            device, dispatcher, max(capture_sizes, default=0), decoder, cache, self._maker, self.rows, codes,
            aux_hidden_states=aux_hidden_states, clock=clock,
        )  # fmt: skip

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """As `ModelRunner.run`: one step from its beginning to its end."""
        ticket = self.launch(plan)
        if meanwhile is not None:
            meanwhile()
        return self.collect(ticket)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedPlan:
        """Hand a step to the device.

        Raises:
            PlanError: the plan contradicts earlier plans; nothing was computed.
            GraphCaptureError: no graph can be captured here; nothing that follows can be trusted.
            RuntimeError: of the device: the same.
        """
        self.check()
        if self.flights.full:
            raise RuntimeError(f"{MOST_LAUNCHED} plans are under way; collect one first")
        begin = perf_counter()
        self.flights.complete()
        self._staging.next_step()
        self.flights.make_way(plan)
        self._apply(plan)
        ticket = self._launched(plan, begin)
        self.flights.add(ticket)
        return ticket

    @torch.inference_mode()
    def collect(self, ticket: LaunchedPlan) -> StepResult:
        """Sleep until a launched step is done. Tickets are given back in the order in which they were taken.

        Raises:
            RuntimeError: another ticket is older; or of the device.
        """
        return self.graphs.reported(self.flights.collect(ticket))

    @torch.inference_mode()
    def idle(self) -> bool:
        """Do a part of what makes later steps faster, unless a plan is under way; whether more may be left. The next
        launch tells what has failed."""
        if self.flights or self._broken is not None:
            return False
        try:
            return self.graphs.idle()
        except Exception as error:
            self._broken = error
            return False

    def check(self) -> None:
        """Raises the error that occurred while nothing was under way."""
        if self._broken is not None:
            raise self._broken

    def settle(self) -> None:
        """Sleep until no step is in flight, so that its memory can be freed."""
        with suppress(RuntimeError):  # the device is broken and does nothing more
            self.device.record().wait()

    def _launched(self, plan: StepPlan, begin: float) -> LaunchedPlan:
        if not plan.rows:
            self._follow(plan, NO_SPANS)
            none, result = np.zeros(0, dtype=bool), step_result(plan, None, np.zeros(0, dtype=bool), (), StepTimings())
            return LaunchedPlan(plan, none, (), (), None, StepTimings(), result)
        starts, counts = np.array(plan.starts, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
        whole = Spans(np.arange(len(plan.rows)), self.rows.slots_of(plan, starts, counts), starts, counts)
        if self.speculator is not None:
            return self._verified(
                plan, self.speculator, self.speculator.begin(plan, whole.slots, starts, counts), begin
            )
        self._follow(plan, whole)
        self.rows.check_window(whole.slots, starts)
        apart = bool(self._with_prompt_logprobs(whole) or self._pooled(whole))
        if self.flights.untold and (apart or int(self._columns.kinds[whole.slots].max()) == ELSEWHERE):
            self.flights.catch_up()
        ending = starts + counts == self.rows.lengths[whole.slots]
        sampling = ending & ~(self.rows.pooled[whole.slots] > 0)
        slots = whole.slots[sampling]
        kind = int(self._columns.kinds[slots].max(initial=GREEDY)) if slots.size else GREEDY
        rows = tuple(row for row, samples in zip(plan.rows, sampling.tolist(), strict=True) if samples)
        guided = self.guides is not None and any(row in self.guides for row in rows)
        chooses = guided or kind == ELSEWHERE or self.chooser.takes(slots)
        graph = self._graph(whole, sampling, GREEDY if chooses else kind)
        if apart or kind == ELSEWHERE:
            return self._at_once(plan, whole, sampling, ending, graph, rows, begin)
        ends = self.rows.lengths[slots]
        numbers: Tensor | None = None
        logits: Tensor | None = None
        if graph is not None:
            columns, logits, numbers = self._replay(graph, whole)
            chooses = chooses or kind > graph.kind  # the graph has appended others
        else:
            columns, hidden = self._eager(whole, sampling)
            logits, chooses = self.decoder.logits(hidden) if slots.size else None, True
        seconds = StepTimings(prepare=perf_counter() - begin)
        positions, logprob_parts = tuple(ends.tolist()), self.chooser.logprob_parts(slots)
        ticket = LaunchedPlan(plan, sampling, rows, positions, None, seconds, logprob_parts=logprob_parts)
        if logits is None:  # chunks of prompts alone; nothing has to come back
            ticket.result = step_result(plan, None, sampling, (), seconds)
        elif guided:
            ticket.choice = Choice(logits, columns, kind, slots, ends)
        else:
            if chooses or numbers is None:
                numbers = self.chooser.append(logits, columns, kind, slots, ends)
            self.rows.advance(slots)
            ticket.returned = self._results.fetch(numbers.flatten())
        return ticket

    def _graph(self, spans: Spans, sampling: NDArray[np.bool_], kind: int) -> GraphKey | None:
        """The key of the graph that can replay the step: every row goes one token further. May capture one."""
        uniform = bool(sampling.all()) and bool((spans.counts == 1).all())
        if self.rows.embeddings and self._inputs(spans) is not None:
            uniform = False
        batch = BatchDescriptor(int(spans.counts.sum()), spans.slots.size, uniform)
        key = self.graphs.dispatcher.key(batch, kind)
        return None if key is None else self.graphs.prepare(key)  # prompts do not wait for a capture either

    def _replay(self, key: GraphKey, spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
        """Replay a step's graph: its columns int64 [WIDTH, rows], logits and tokens, which were appended."""
        count = spans.slots.size
        columns = self._columns.of(spans.slots, spans.starts + 1, key.requests, self.rows.scratch)
        sent = self._send(columns)
        logits, tokens = self.graphs.run(key)
        return sent[0][:, :count], logits[:count], tokens[:count]

    def _send(self, columns: NDArray[np.int64], *more: NDArray[np.int64]) -> list[Tensor]:
        """Before a graph: send its columns to where it reads them, all changes of rows, and more, which is returned
        behind the columns."""
        sent = self._staging.send(columns, *more, *self.rows.changes(), into=self.graphs.columns)
        if sent[0].data_ptr() != self.graphs.columns.data_ptr():  # more has changed than there is room for
            self.graphs.columns[: columns.size].copy_(sent[0].view(-1))
        self.rows.apply(tuple(sent[1 + len(more) :]))
        return sent[: 1 + len(more)]

    def _replay_drafts(self, key: GraphKey, spans: Spans, aux: list[Tensor]) -> Tensor:
        """A step with drafts that has a graph: logits of the virtual rows. tapped: as for `_forward`."""
        counts, queries = spans.counts, key.queries
        columns = self._columns.of(spans.slots, spans.starts + counts, key.requests, self.rows.scratch, counts)
        owner = np.repeat(np.arange(counts.size), counts)
        # A row's own tokens are the last ones of its part of the batch.
        places = owner * queries + queries - np.repeat(np.cumsum(counts), counts) + np.arange(owner.size)
        _, every, drawn = self._send(columns, places, places[self._wanted(spans)[0]])
        logits, shown = self.graphs.verify(key)
        if shown.shape[1]:
            aux.append(shown.index_select(0, every))
        return logits.index_select(0, drawn)

    def _graph_of_drafts(self, spans: Spans, sampling: NDArray[np.bool_], verify_batch: VerifyBatch) -> GraphKey | None:
        """The key of the graph that can replay a step with drafts, if any. May capture one."""
        if verify_batch.trees or not sampling.all() or self._with_prompt_logprobs(spans):
            return None
        if self.rows.embeddings and self._inputs(spans) is not None:
            return None
        longest, tokens = int(spans.counts.max()), int(spans.counts.sum())
        batch = BatchDescriptor(tokens, spans.slots.size, uniform=bool((spans.counts == longest).all()))
        key = self.graphs.dispatcher.verifying(batch, longest, pads=self._pads)
        return None if key is None else self.graphs.prepare(key)

    def _verified(self, plan: StepPlan, made: Speculator, verify_batch: VerifyBatch, begin: float) -> LaunchedPlan:
        """A step of a runner that speculates, to its end."""
        spans, none = verify_batch.spans, np.zeros(len(plan.rows), dtype=bool)
        self._follow(plan, spans)
        if not spans.slots.size:
            result = step_result(plan, None, none, (), StepTimings())
            return LaunchedPlan(plan, none, (), (), None, StepTimings(), result)
        self.rows.check_window(spans.slots, spans.starts)
        ends, lengths = spans.starts + spans.counts, self.rows.lengths[spans.slots]
        pooled = self.rows.pooled[spans.slots] > 0
        check = Verification(
            plan, verify_batch, (ends >= lengths) & ~pooled, self.rows, self.sampler, self.guides, made
        )  # fmt: skip
        filled = check.begin_masks()
        prepared, aux = perf_counter(), list[Tensor]()
        sampling, about_prompts = (ends >= lengths) & ~pooled, list[RowLogprobs]()
        logits: Tensor | None = None
        graph = self._graph_of_drafts(spans, sampling, verify_batch)
        if graph is not None:
            logits = self._replay_drafts(graph, spans, aux)
        else:
            _, hidden = self._eager(spans, sampling, aux, verify_batch)
            about_prompts = self._prompt_logprobs(plan, spans, hidden[len(check.drawn) :])
            self._pool(spans, hidden)
            logits = self.decoder.logits(hidden[: len(check.drawn)]) if check.drawn else None
        computed = perf_counter()
        masks = None if self.guides is None or filled is None else self._masks(self.guides, filled)
        check.sample(logits, masks)
        if verify_batch.trees:
            self._gather_paths(check)
        made.learn(verify_batch, check.verdict, aux, perf_counter() - begin)
        vectors, unsound = self._finish_pooled(plan, spans, (ends == lengths) & pooled)
        timings = StepTimings(prepare=prepared - begin, forward=computed - prepared, sample=perf_counter() - computed)
        result = check.result(about_prompts, vectors, unsound, timings)
        return LaunchedPlan(plan, none, (), (), None, timings, result)

    def _eager(
        self,
        spans: Spans,
        sampling: NDArray[np.bool_],
        aux: list[Tensor] | None = None,
        verify_batch: VerifyBatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute any step, kernel by kernel. tapped: as for `_forward`; trial: where rows may have trees of drafts.

        Returns:
            columns int64 [WIDTH, sampling rows], and what `_batch` wants logits or vectors of, as hidden states.
        """
        slots, starts, counts = spans.slots, spans.starts, spans.counts
        stops = np.cumsum(counts)
        owner = np.repeat(np.arange(slots.size), counts)
        positions = np.arange(stops[-1]) - np.repeat(stops - counts - starts, counts)
        single = counts == 1
        order = np.argsort(~single, kind="stable")
        table = np.stack((slots, stops - counts, stops, starts + counts))[:, order]
        tokens = np.stack((slots[owner], positions, np.argsort(order)[owner]))
        columns = self._columns.of(
            slots[sampling], (starts + counts)[sampling], int(sampling.sum()), self.rows.scratch
        )  # fmt: skip
        wanted, _ = self._wanted(spans)
        wanted = wanted if wanted.size else np.zeros(1, np.int64)  # no kernel is asked for nothing
        grown = host_trees(verify_batch, spans, positions, owner, order, self.cache.layout)
        sent = self._staging.send(columns, table, tokens, wanted, *self.rows.changes(), *grown.values())
        self.rows.apply(tuple(sent[4:8]))
        text, trees = device_trees(list(grown), sent[8:])
        by_row, by_token = sent[1], sent[2]
        narrow = by_row[1:].to(torch.int32)
        inputs = self._inputs(spans) if self.rows.embeddings else None
        if inputs is not None:
            inputs = (inputs[0].to(self.device.torch_device), inputs[1].to(self.device.torch_device))
        batch = self._maker.make(
            DeviceSpans(narrow[0], narrow[1], narrow[2], by_token.shape[1], int(single.sum()), trees=trees,
                        owners=by_token[2], known=table[1:]),
            by_row[0], by_token[0], by_token[1], self.rows, sent[3], text=text, inputs=inputs,
        )  # fmt: skip
        return sent[0], self._forward(batch, [] if aux is None else aux)

    def _at_once(
        self, plan: StepPlan, spans: Spans, sampling: NDArray[np.bool_], ending: NDArray[np.bool_],
        graph: GraphKey | None, rows: tuple[int, ...], begin: float,
    ) -> LaunchedPlan:  # fmt: skip
        """A step that the host has to look into."""
        slots = spans.slots[sampling]
        filled = None if self.guides is None else self.guides.begin(rows)
        about_prompts: list[RowLogprobs] = []
        logits: Tensor | None = None
        prepared = perf_counter()
        if graph is not None:
            _, logits, _ = self._replay(graph, spans)
        else:
            _, hidden = self._eager(spans, sampling)
            about_prompts = self._prompt_logprobs(plan, spans, hidden[slots.size :])
            self._pool(spans, hidden)
            logits = self.decoder.logits(hidden[: slots.size]) if slots.size else None
        computed = perf_counter()
        masks = None if self.guides is None or filled is None else self._masks(self.guides, filled)
        sampled = None if logits is None else self._sample(rows, slots, logits, masks)
        guided = None
        if self.guides is not None and masks is not None and sampled is not None:
            guided = report_tokens(self.guides, self.rows, rows, slots, sampled)
        vectors, unsound = self._finish_pooled(plan, spans, ending & ~sampling)
        timings = StepTimings(prepare=prepared - begin, forward=computed - prepared, sample=perf_counter() - computed)
        result = step_result(plan, sampled, sampling, tuple(about_prompts), timings, vectors, unsound, guided)
        return LaunchedPlan(plan, sampling, rows, (), None, timings, result)

    def _apply(self, plan: StepPlan) -> None:
        super()._apply(plan)
        for new in plan.new_rows:
            if new.pooling is None:
                self._columns.put(self.rows.slot(new.row), self.sampler.options(new.row))
        for change in plan.changes:
            if change.sampling is not None:
                self._columns.put(self.rows.slot(change.row), self.sampler.options(change.row))

    def _masks(self, guides: GuidedRows, filled: FilledLater) -> TokenMasks:
        masks = guides.filled(filled)
        device = self.device.torch_device
        return replace(masks, index=to_device(masks.index, device), bits=to_device(masks.bits, device))

    def _vectors(self, hidden: Tensor) -> Tensor:
        """Pooled on the host."""
        return super()._vectors(hidden).cpu()


def _classified(decoder: RunnableDecoder, device: torch.device, vectors: Tensor) -> Tensor:
    """Logits of vectors on the host. No method of a runner, which its pooler would keep for ever."""
    return decoder.classify(vectors.to(device)).cpu()
