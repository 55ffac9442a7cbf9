"""Whole decode steps as graphs: from the last token of each row to its next one.

A graph reads its inputs at fixed addresses: the step's columns, the rows' tokens and block tables, the weights, the
cache. It appends the sampled tokens to the rows, where the next step reads them.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import msgspec
import torch
from torch import Tensor

from troupellm.models.adapters.batch import graph_batch
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.gpu.batch import BatchMaker
from troupellm.models.gpu.device import Device, Graph, memory_errors
from troupellm.models.gpu.graph_dispatch import Dispatcher, GraphKey
from troupellm.models.gpu.row_table import DeviceRows
from troupellm.models.gpu.sampling_tensors import ADAPTER, COUNT, END, SLOT, TOP_K, WIDTH, choose
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.protocol.errors import GraphCaptureError
from troupellm.protocol.messages.graph_report import GraphReport
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink, StepResult

logger = logging.getLogger("troupellm.worker")

CAPTURE_SHARE = 0.1
"""Share of the time that captures may take while steps come: requests wait for each of them."""


class DecodeGraphs:
    """Replays the graphs that there are, and captures the others one by one: while nothing is to be done, and now and
    then between steps.

    Attributes:
        columns: int64 [n] on the device, whose beginning is where a step's columns go before `run`.
        capture_seconds: time spent on captures so far.
    """

    def __init__(
        self,
        device: Device,
        dispatcher: Dispatcher,
        largest: int,
        decoder: RunnableDecoder,
        cache: KVCache,
        maker: BatchMaker,
        rows: DeviceRows,
        codes: Tensor,
        *,
        aux_hidden_states: AuxHiddenStates | None = None,
        adapters: AdapterSlots | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """
        Args:
            largest: rows of the largest graph.
            codes: `noise.token_codes`.
            aux_hidden_states: graphs verify drafts: they end with logits of all tokens and with what a proposer is
                shown. None: they end with tokens.
            adapters: for the graphs of steps with adapters.
            clock: seconds.
        """
        self.dispatcher = dispatcher
        self._device, self._decoder, self._cache, self._maker = device, decoder, cache, maker
        self._rows, self._codes, self._generation = rows, codes, rows.generation
        self._adapters = adapters
        self.columns = torch.zeros(WIDTH * largest * 2, dtype=torch.int64, device=device.torch_device)
        # In no graph's own memory, which would keep what each of them gives apart from all others'.
        most = max(largest, dispatcher.most_tokens)
        self._logits = torch.empty(most, decoder.config.vocab_size, dtype=torch.float32, device=device.torch_device)
        self._aux_hidden_states = aux_hidden_states
        width = (
            0
            if aux_hidden_states is None
            else decoder.config.hidden_size * (len(aux_hidden_states.layers) + aux_hidden_states.last)
        )
        self._aux_layers = torch.empty(most, width, dtype=decoder.dtype, device=device.torch_device)
        device.forget_graphs()  # those of another runner: what is left of their memory is not shared with these
        self._graphs: dict[GraphKey, tuple[Graph, list[Tensor]]] = {}
        self._last: GraphKey | None = None
        self._warm: GraphKey | None = None
        """The key that can be captured: all its kernels have been launched once."""
        self._clock, self._due = clock, 0.0
        self.capture_seconds = 0.0
        self._reported: tuple[int, int] | None = None

    def prepare(self, wanted: GraphKey) -> GraphKey | None:
        """Before a step: capture a graph, if one is missing and those who wait for tokens have not waited for another
        one just now. Nothing that is under way is disturbed.

        Args:
            wanted: the graph that is made for the step.

        Returns:
            the one to compute it with; None: there is none yet.

        Raises:
            GraphCaptureError: a capture, or the step before it, failed, and not for want of memory.
            RuntimeError: of the device, which steps that are under way have failed on.
        """
        self._renew()
        self.dispatcher.want(wanted)
        key, begin = self.dispatcher.next_capture(), self._clock()
        if key is not None and begin >= self._due:
            self._go_on(key, whole=True)
            end = self._clock()
            self._due = end + (end - begin) * (1.0 / CAPTURE_SHARE - 1.0)
        return self.dispatcher.stand_in(wanted)

    def idle(self) -> bool:
        """While no step is under way: do a part of what a capture takes. A step that comes meanwhile waits for that
        part alone.

        Returns:
            whether something was done, so that more may be left.

        Raises:
            GraphCaptureError: as `prepare`.
            RuntimeError: as `prepare`.
        """
        self._renew()
        key = self.dispatcher.next_capture()
        if key is None:
            return False
        self._go_on(key)
        return True

    def _go_on(self, key: GraphKey, *, whole: bool = False) -> None:
        """Do one part of a capture, or all of it. Steps need graphs less than they need memory: when it has run out,
        those that there are have to do."""
        self._device.record().wait()  # what is under way fails here, and no capture is blamed for it
        try:
            if self._warm != key:
                self._warm_up(key)
                if not whole:
                    return
            self._capture(key)
        except torch.OutOfMemoryError as error:
            self.dispatcher.give_up()
            self._warm = None
            logger.warning(
                "no memory for a CUDA graph of %d rows of %d: the %d that are missing are not captured; lower "
                "gpu_memory_utilization or name fewer cudagraph_capture_sizes (%s)",
                key.requests,
                key.queries,
                self.dispatcher.given_up,
                error,
            )
        except Exception as error:
            said = f"a CUDA graph of {key.requests} rows of {key.queries} could not be captured"
            raise GraphCaptureError(said) from error

    def _renew(self) -> None:
        """The graphs that there are stand on memory of the rows."""
        if self._generation == self._rows.generation:
            return
        self._graphs.clear()
        self._warm, self._last = None, None
        self._device.forget_graphs()
        self.dispatcher.forget()
        self._generation = self._rows.generation

    def reported(self, result: StepResult) -> StepResult:
        """Add the graphs' report to a result if it has changed."""
        now = (self.dispatcher.captured, self.dispatcher.missing)
        if now == self._reported:
            return result
        self._reported = now
        return msgspec.structs.replace(result, graphs=self.report())

    def report(self) -> GraphReport:
        """The numbers of captured, missing and given-up graphs."""
        return GraphReport(
            captured=self.dispatcher.captured,
            missing=self.dispatcher.missing,
            given_up=self.dispatcher.given_up,
            seconds=self.capture_seconds,
            bytes=self._device.graph_bytes,
        )

    def run(self, key: GraphKey) -> tuple[Tensor, Tensor]:
        """Compute the step whose rows are in `columns`.

        Returns:
            as `decode`; both last until the next step.
        """
        graph, given = self._graphs[key]
        graph.replay()
        self._last = key
        return self._logits[: key.requests], given[0]

    def verify(self, key: GraphKey) -> tuple[Tensor, Tensor]:
        """Compute the step whose rows are in `columns`, with a graph that verifies drafts.

        Returns:
            logits float32 [rows * queries, vocab], and what is shown to the proposer [rows * queries, width]; both
            last until the next step.
        """
        self._graphs[key][0].replay()
        self._last = key
        return self._logits[: key.tokens], self._aux_layers[: key.tokens]

    @property
    def replayed(self) -> bool:
        """True if there is a step that `repeat` can compute again."""
        return self._last is not None

    def repeat(self, times: int) -> float:
        """For benchmarks: seconds of the last step's graph alone, of `times` replays without anything between them.
        Each replay computes the same step again and leaves the same state.

        Raises:
            RuntimeError: no step was replayed yet.
        """
        if self._last is None:
            raise RuntimeError("no step had a graph yet")
        self._device.record().wait()
        begin = perf_counter()
        for _ in range(times):
            self._graphs[self._last][0].replay()
        self._device.record().wait()
        return (perf_counter() - begin) / times

    def decode(self, key: GraphKey, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The step itself, of one token of each row.

        Args:
            columns: int64 [WIDTH, rows].

        Returns:
            logits float32 [rows, vocab], and the tokens that were appended to the rows int64 [rows], -1 of a row
            without any.
        """
        hidden = self._decoder.forward(self._batch(key, columns), self._cache.layers)
        logits = self._decoder.logits(hidden, self._logits[: key.requests])
        return logits, choose(logits, columns, self._codes, key.kind, self._rows.tokens)

    def _batch(self, key: GraphKey, columns: Tensor) -> ForwardBatch:
        counts = columns[COUNT] if key.queries > 1 else None
        batch = self._maker.make_uniform(
            columns[SLOT], columns[END], counts, key.queries, self._rows, self._decoder.angle_table
        )
        if not key.adapters or self._adapters is None:
            return batch
        of_tokens = columns[ADAPTER] if key.queries == 1 else columns[ADAPTER].repeat_interleave(key.queries)
        return replace(batch, adapters=graph_batch(self._adapters, of_tokens))

    def verified(self, key: GraphKey, columns: Tensor, aux_hidden_states: AuxHiddenStates) -> None:
        """The step itself, of tokens that are to be verified: leaves what `verify` gives."""
        batch, caches = self._batch(key, columns), self._cache.layers
        if aux_hidden_states.shows:
            hidden, aux = self._decoder.forward_with_aux(batch, caches, aux_hidden_states)
            self._aux_layers[: key.tokens].copy_(aux)
        else:
            hidden = self._decoder.forward(batch, caches)
        self._decoder.logits(hidden, self._logits[: key.tokens])

    @torch.inference_mode()
    def warm_up(self, progress: ProgressSink) -> None:
        """Run a step of every kind, whose rows all pad: what a graph needs compiled is not compiled while requests wait
        for its capture."""
        kinds = self.dispatcher.kinds
        for number, key in enumerate(kinds):
            progress(LoadProgress(phase="warm_up", done=number, total=len(kinds)))
            self._warm_up(key)
        self._warm = None

    def _warm_up(self, key: GraphKey) -> None:
        """Compute such a step, of rows that all pad: it compiles, and sets up what is set up once."""
        static = self._static(key)
        static.zero_()
        static[SLOT].fill_(self._rows.scratch)
        static[TOP_K].fill_(1)
        begin = self._clock()
        with memory_errors():
            self._compute(key, [])
            self._device.record().wait()
        self._last = None  # its columns are overwritten
        self._warm = key
        self.capture_seconds += self._clock() - begin

    def _static(self, key: GraphKey) -> Tensor:
        """The columns that a graph reads, int64 [WIDTH, rows]."""
        return self.columns[: WIDTH * key.requests].view(WIDTH, key.requests)

    def _compute(self, key: GraphKey, found: list[Tensor]) -> None:
        """The body of a graph. found: receives the tokens, at fixed addresses; empty where drafts are verified."""
        if self._aux_hidden_states is not None:
            self.verified(key, self._static(key), self._aux_hidden_states)
        else:
            found[:] = [self.decode(key, self._static(key))[1]]

    def _capture(self, key: GraphKey) -> None:
        """Capture a graph whose kernels were warmed up."""
        self._warm = None
        found: list[Tensor] = []
        begin = self._clock()
        # Only `_graphs` keeps it, so that its memory is free as soon as `_graphs` is dropped.
        graph = self._device.capture(partial(self._compute, key, found))
        self._graphs[key] = (graph, found)
        self.capture_seconds += self._clock() - begin
        self.dispatcher.add(key)
