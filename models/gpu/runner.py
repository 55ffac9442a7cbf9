"""The model runner of an asynchronous device: plans are launched, and their results are collected later."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.sampling.noise import token_codes
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.spans import Spans
from troupellm.models.batch.step_result import step_result
from troupellm.models.config.pooling_config import Activation
from troupellm.models.gpu.batch import BatchMaker, DeviceSpans, GroupPlanner
from troupellm.models.gpu.cuda_graphs import DecodeGraphs
from troupellm.models.gpu.device import Device
from troupellm.models.gpu.draft_trees import device_trees, host_trees
from troupellm.models.gpu.graph_dispatch import BatchDescriptor, Dispatcher, GraphKey
from troupellm.models.gpu.guided_rows import LateChoices
from troupellm.models.gpu.host_transfer import Results, Staging
from troupellm.models.gpu.launched_step import Choice, LaunchedPlan, computed_plan
from troupellm.models.gpu.row_table import DeviceRows
from troupellm.models.gpu.sample import Chooser
from troupellm.models.gpu.sampling_tensors import ELSEWHERE, GREEDY, SamplingTensors
from troupellm.models.gpu.steps_in_flight import LaunchedSteps
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.runner.poison import Poison
from troupellm.models.runner.pooler import Pooler
from troupellm.models.runner.stages import Stages, empty_result
from troupellm.models.runner.step import Step
from troupellm.models.sampling.logits_processors import Processors
from troupellm.models.sampling.sampler import Sampler
from troupellm.models.speculation.speculator import MakeSpeculator
from troupellm.models.speculation.verify_batch import VerifyBatch
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.protocol.messages.worker import MOST_LAUNCHED, StepPlan, StepResult, StepTimings

TURNS = MOST_LAUNCHED + 1


class CudaRunner:
    """Executes plans on a device, by the stages of every runner; `ModelRunner` lists the forms of a step.

    Calls come from one thread; up to two plans are under way. A step is launched without any wait for the device; the
    choice of one with guided rows is launched when the tokens before it are known. One that the host looks into (for
    plug-ins, limits to thinking, banned words of several tokens, prompts' log-probabilities, pooling) is computed to
    its end when it is launched, and so is every step of a runner that speculates: what is drafted next depends on what
    was kept. Steps of few tokens per row have graphs there, too.
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
        speculation: MakeSpeculator | None = None,
        adapters: AdapterSlots | None = None,
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
        self.device, self._staging = device, Staging(device, TURNS)
        rows = DeviceRows(
            max_model_len=max_model_len,
            block_size=cache.block_size,
            num_groups=len(cache.layout.windows),
            device=device,
            staging=self._staging,
            slots=slots,
            null_page=cache.num_blocks - 1,
        )
        sampler = Sampler(decoder.config.vocab_size, cache.storage.device, processors)
        head = None if decoder.score is None else partial(_classified, decoder, device.torch_device)
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
            asynchronous=True,
        )
        self._columns = SamplingTensors()
        codes = token_codes(decoder.config.vocab_size, device.torch_device)
        self.chooser = Chooser(self._columns, codes, self.rows, self._staging)
        self._maker = BatchMaker(cache, plan)
        self._results = Results(device, TURNS, max(slots, 1))
        late = None if guides is None else LateChoices(guides, self.chooser, self.rows)
        self.flights = LaunchedSteps(device, self._results, late, decoder.config.vocab_size)
        self._broken: Exception | None = None
        self._pads = set(cache.layout.windows) == {None}  # all that lies before the tokens of rows is there still
        self.graphs = self._make_graphs(capture_sizes, codes, clock)

    def _make_graphs(self, sizes: tuple[int, ...], codes: Tensor, clock: Callable[[], float]) -> DecodeGraphs:
        """The graphs of decode steps, or of the verification of drafts; arguments as of the runner."""
        adapters = self.stages.adapters
        with_adapters = adapters is not None and not self.decoder.batch_invariant
        dispatcher, aux_hidden_states = Dispatcher(sizes, adapters=with_adapters), None
        if self.speculator is not None:
            aux_hidden_states = self.speculator.aux_hidden_states
            queries = (1, 1 + self.speculator.most)
            dispatcher = Dispatcher(sizes, queries=queries, draws=False, adapters=with_adapters)
        return DecodeGraphs(
            self.device,
            dispatcher,
            max(sizes, default=0),
            self.decoder,
            self.cache,
            self._maker,
            self.rows,
            codes,
            aux_hidden_states=aux_hidden_states,
            adapters=adapters,
            clock=clock,
        )

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Compute one step from its beginning to its end; arguments and errors as of `ModelRunner.run`."""
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
        step = self.stages.spans(plan, begin)
        spans = step.spans
        if not spans.slots.size:
            return computed_plan(plan, empty_result(plan))
        self.rows.check_window(spans.slots, spans.starts)
        if step.verify_batch is not None:
            return self._at_once(step, self._graph_of_drafts(spans, step.sampling, step.verify_batch))
        reads = bool(self.stages.with_prompt_logprobs(spans) or self.stages.pooled(spans))
        if self.flights.untold and (reads or int(self._columns.kinds[spans.slots].max()) == ELSEWHERE):
            self.flights.catch_up()
            step.sampling, step.pooling = self.stages.ending(spans)
        slots = spans.slots[step.sampling]
        kind = int(self._columns.kinds[slots].max(initial=GREEDY)) if slots.size else GREEDY
        rows = tuple(row for row, samples in zip(plan.rows, step.sampling.tolist(), strict=True) if samples)
        guided = self.guides is not None and any(row in self.guides for row in rows)
        chooses = guided or kind == ELSEWHERE or self.chooser.takes(slots)
        graph = self._graph(spans, step.sampling, GREEDY if chooses else kind)
        if reads or kind == ELSEWHERE:
            return self._at_once(step, graph)
        ends = self.rows.lengths[slots]
        numbers: Tensor | None = None
        logits: Tensor | None = None
        if graph is not None:
            columns, logits, numbers = self._replay(graph, spans)
            chooses = chooses or kind > graph.kind  # the graph has appended others
        else:
            columns, hidden = self._eager(step)
            logits, chooses = self.stages.logits(hidden, rows) if slots.size else None, True
        seconds = StepTimings(prepare=perf_counter() - begin)
        positions, logprob_parts = tuple(ends.tolist()), self.chooser.logprob_parts(slots)
        ticket = LaunchedPlan(plan, step.sampling, rows, positions, None, seconds, logprob_parts=logprob_parts)
        if logits is None:  # chunks of prompts alone; nothing has to come back
            ticket.result = step_result(plan, None, step.sampling, (), seconds)
        elif guided:
            ticket.choice = Choice(logits, columns, kind, slots, ends)
        else:
            if chooses or numbers is None:
                numbers = self.chooser.append(logits, columns, kind, slots, ends)
            self.rows.advance(slots)
            ticket.returned = self._results.fetch(numbers.flatten())
        return ticket

    def _at_once(self, step: Step, graph: GraphKey | None) -> LaunchedPlan:
        """A step that the host looks into, to its end."""
        stages = self.stages
        stages.begin_masks(step)
        drawn = len(step.drawn)
        logits: Tensor | None = None
        if graph is None:
            _, hidden = self._eager(step)
            stages.read_prompts(step, step.spans, hidden, drawn)
            logits = stages.logits(hidden[:drawn], step.drawn) if drawn else None
        elif step.verify_batch is None:
            _, logits, _ = self._replay(graph, step.spans)
        else:
            logits = self._replay_drafts(graph, step)
        stages.sample(step, logits)
        return computed_plan(step.plan, stages.result(step))

    def _graph(self, spans: Spans, sampling: NDArray[np.bool_], kind: int) -> GraphKey | None:
        """The key of the graph that can replay the step: every row goes one token further. May capture one."""
        uniform = bool(sampling.all()) and bool((spans.counts == 1).all())
        if self.rows.has_inputs and self.stages.inputs(spans) is not None:
            uniform = False
        adapted = self._adapted(spans)
        batch = BatchDescriptor(
            int(spans.counts.sum()), spans.slots.size, uniform and adapted is not None, bool(adapted)
        )
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

    def _replay_drafts(self, key: GraphKey, step: Step) -> Tensor:
        """Replay the graph of a step with drafts: logits of the virtual rows."""
        spans, counts, queries = step.spans, step.spans.counts, key.queries
        columns = self._columns.of(spans.slots, spans.starts + counts, key.requests, self.rows.scratch, counts)
        owner = np.repeat(np.arange(counts.size), counts)
        # A row's own tokens are the last ones of its part of the batch.
        places = owner * queries + queries - np.repeat(np.cumsum(counts), counts) + np.arange(owner.size)
        _, every, drawn = self._send(columns, places, places[self.stages.wanted(spans)[0]])
        logits, shown = self.graphs.verify(key)
        if shown.shape[1]:
            step.aux.append(shown.index_select(0, every))
        return logits.index_select(0, drawn)

    def _graph_of_drafts(self, spans: Spans, sampling: NDArray[np.bool_], verify_batch: VerifyBatch) -> GraphKey | None:
        """The key of the graph that can replay a step with drafts, if any. May capture one."""
        if verify_batch.trees or not sampling.all() or self.stages.with_prompt_logprobs(spans):
            return None
        if self.rows.has_inputs and self.stages.inputs(spans) is not None:
            return None
        longest, tokens = int(spans.counts.max()), int(spans.counts.sum())
        adapted = self._adapted(spans)
        if adapted is None:
            return None
        batch = BatchDescriptor(tokens, spans.slots.size, bool((spans.counts == longest).all()), adapted)
        key = self.graphs.dispatcher.verifying(batch, longest, pads=self._pads)
        return None if key is None else self.graphs.prepare(key)

    def _adapted(self, spans: Spans) -> bool | None:
        """Whether a row computes with an adapter; None where no graph does so. Batch-invariant rows take one path,
        beside rows with adapters and alone."""
        adapters = self.stages.adapters
        if adapters is not None and self.decoder.batch_invariant:
            return None
        if adapters is None or not self.rows.adapted:
            return False
        numbers = self.rows.adapters[spans.slots]
        if not numbers.any():
            return False
        return True if adapters.goes_into_graphs(numbers) else None

    def _eager(self, step: Step) -> tuple[Tensor, Tensor]:
        """Compute any step, kernel by kernel.

        Returns:
            columns int64 [WIDTH, sampling rows], and the hidden states that `Stages.wanted` names.
        """
        spans, sampling = step.spans, step.sampling
        slots, starts, counts = spans.slots, spans.starts, spans.counts
        stops = np.cumsum(counts)
        owner = np.repeat(np.arange(slots.size), counts)
        positions = np.arange(stops[-1]) - np.repeat(stops - counts - starts, counts)
        single = counts == 1
        order = np.argsort(~single, kind="stable")
        table = np.stack((slots, stops - counts, stops, starts + counts))[:, order]
        tokens = np.stack((slots[owner], positions, np.argsort(order)[owner]))
        columns = self._columns.of(slots[sampling], (starts + counts)[sampling], int(sampling.sum()), self.rows.scratch)
        wanted, _ = self.stages.wanted(spans)
        wanted = wanted if wanted.size else np.zeros(1, np.int64)  # no kernel is asked for nothing
        grown = host_trees(step.verify_batch, spans, positions, owner, order, self.cache.layout)
        sent = self._staging.send(columns, table, tokens, wanted, *self.rows.changes(), *grown.values())
        self.rows.apply(tuple(sent[4:8]))
        text, trees = device_trees(list(grown), sent[8:])
        by_row, by_token = sent[1], sent[2]
        narrow = by_row[1:].to(torch.int32)
        inputs = self.stages.inputs(spans) if self.rows.has_inputs else None
        if inputs is not None:
            inputs = (inputs[0].to(self.device.torch_device), inputs[1].to(self.device.torch_device))
        batch = self._maker.make(
            DeviceSpans(
                narrow[0],
                narrow[1],
                narrow[2],
                by_token.shape[1],
                int(single.sum()),
                trees=trees,
                owners=by_token[2],
                known=table[1:],
            ),
            by_row[0],
            by_token[0],
            by_token[1],
            self.rows,
            sent[3],
            text=text,
            inputs=inputs,
            adapters=self.stages.adapted(spans, owner),
        )
        return sent[0], self.stages.forward(step, batch)

    def _apply(self, plan: StepPlan) -> None:
        self.stages.apply(plan)
        for new in plan.new_rows:
            if new.pooling is None:
                self._put_columns(new.row)
        for change in plan.changes:
            if change.sampling is not None:
                self._put_columns(change.row)

    def _put_columns(self, row: int) -> None:
        slot = self.rows.slot(row)
        self._columns.put(slot, self.stages.sampler.options(row), int(self.rows.adapters[slot]))


def _classified(decoder: RunnableDecoder, device: torch.device, vectors: Tensor) -> Tensor:
    """Logits of vectors on the host. No method of a runner, which its pooler would keep for ever."""
    return decoder.classify(vectors.to(device)).cpu()
