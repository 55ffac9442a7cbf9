"""Whole decode steps, from the tokens that rows end with to the tokens that follow them, as graphs.

A graph reads what it computes for from memory that stays where it is: the step's columns, the rows' tokens and block
tables, the weights, the cache. It writes the sampled tokens to the rows' own, where the next step finds them.
"""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from troupellm.models.cuda.batch import BatchMaker, uniform_spans
from troupellm.models.cuda.columns import COUNT, DRAWN, END, GREEDY, SLOT, WIDTH, choose
from troupellm.models.cuda.device import Device, Graph
from troupellm.models.cuda.dispatcher import Dispatcher, GraphKey
from troupellm.models.cuda.rows import DeviceRows
from troupellm.models.decoder import RunnableDecoder
from troupellm.models.forward_batch import ForwardBatch
from troupellm.models.kv_cache import KVCache
from troupellm.models.speculation.proposer import Taps


class DecodeGraphs:
    """Replays the graphs that there are, and captures the others one by one.

    Attributes:
        columns: int64 [n] on the device, whose beginning is where a step's columns go before `run`.
        capture_seconds: what capturing has taken so far.
    """

    def __init__(
        self, device: Device, dispatcher: Dispatcher, largest: int, decoder: RunnableDecoder, cache: KVCache,
        maker: BatchMaker, rows: DeviceRows, codes: Tensor, *, taps: Taps | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            largest: rows of the largest graph.
            codes: `noise.token_codes`.
            taps: graphs verify drafts: they end with logits of all tokens and with what a proposer is shown. None:
                they end with tokens.
        """
        self.dispatcher = dispatcher
        self._device, self._decoder, self._cache, self._maker = device, decoder, cache, maker
        self._rows, self._codes, self._generation = rows, codes, rows.generation
        self.columns = torch.zeros(WIDTH * largest * 2, dtype=torch.int64, device=device.torch_device)
        # In no graph's own memory, which would keep what each of them gives apart from all others'.
        most = max(largest, dispatcher.most_tokens)
        self._logits = torch.empty(most, decoder.config.vocab_size, dtype=torch.float32, device=device.torch_device)
        self._taps = taps
        width = 0 if taps is None else decoder.config.hidden_size * (len(taps.layers) + taps.last)
        self._tapped = torch.empty(most, width, dtype=decoder.dtype, device=device.torch_device)
        device.forget_graphs()  # those of another runner: what is left of their memory is not shared with these
        self._graphs: dict[GraphKey, tuple[Graph, list[Tensor]]] = {}
        self._last: GraphKey | None = None
        self.capture_seconds = 0.0

    def prepare(self, wanted: GraphKey | None) -> None:
        """Before a step: capture at most one graph, whose rows all pad. Nothing that is under way is disturbed.

        Args:
            wanted: the graph that the step would like to have.
        """
        if self._generation != self._rows.generation:
            self._graphs.clear()
            self._last = None
            self._device.forget_graphs()
            self.dispatcher.forget()
            self._generation = self._rows.generation
        key = self.dispatcher.next_capture(wanted)
        if key is not None:
            self._capture(key)

    def ready(self, key: GraphKey) -> bool:
        """Whether `run` can be called."""
        return key in self._graphs

    def run(self, key: GraphKey) -> tuple[Tensor, Tensor]:
        """Compute the step that `columns` tell of.

        Returns:
            logits float32 [rows, vocab], of no use where tokens are drawn, and tokens int64 [rows], as of `decode`;
            they last until the next step.
        """
        graph, given = self._graphs[key]
        graph.replay()
        self._last = key
        return self._logits[: key.requests], given[0]

    def verify(self, key: GraphKey) -> tuple[Tensor, Tensor]:
        """Compute the step that `columns` tell of, of graphs that verify.

        Returns:
            logits float32 [rows * queries, vocab], and what is shown to the proposer [rows * queries, width]; both
            last until the next step.
        """
        self._graphs[key][0].replay()
        self._last = key
        return self._logits[: key.tokens], self._tapped[: key.tokens]

    @property
    def replayed(self) -> bool:
        """Whether there is a step that `repeat` can compute again."""
        return self._last is not None

    def repeat(self, times: int) -> float:
        """For benchmarks: seconds of the last step's graph alone, of `times` replays without anything between them.
        Each computes the same step again, and leaves what the step left.

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
        """The step itself.

        Args:
            columns: int64 [WIDTH, rows].

        Returns:
            logits float32 [rows * queries, vocab], of no use where tokens are drawn; tokens int64 [rows * queries], -1
            of a row without any, which are appended to their rows where each row has one.
        """
        slots, ends = columns[SLOT], columns[END]
        logits = self._decoder.logits(self._decoder.forward(self._batch(key, columns), self._cache.layers))
        if key.queries > 1:
            columns = columns.repeat_interleave(key.queries, dim=1)
        tokens = choose(logits, columns, self._codes, DRAWN if key.draws else GREEDY)
        if key.queries == 1:
            write_tokens(self._rows.tokens, slots, ends, tokens)
        return logits, tokens

    def _batch(self, key: GraphKey, columns: Tensor) -> ForwardBatch:
        counts = columns[COUNT] if key.queries > 1 else None
        spans = uniform_spans(columns[SLOT], columns[END], key.queries, counts, self._rows.scratch)
        everything = torch.arange(spans.positions.shape[0], device=columns.device)
        return self._maker.make(spans, self._rows.tokens, self._rows.block_tables, everything)

    def _verified(self, key: GraphKey, columns: Tensor, taps: Taps) -> None:
        batch, caches = self._batch(key, columns), self._cache.layers
        if taps.shows:
            hidden, tapped = self._decoder.forward_tapped(batch, caches, taps)
            self._tapped[: key.tokens].copy_(tapped)
        else:
            hidden = self._decoder.forward(batch, caches)
        self._logits[: key.tokens].copy_(self._decoder.logits(hidden))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a step of every kind, whose rows all pad: what a graph needs compiled is not compiled while requests wait
        for its capture."""
        for key in self.dispatcher.kinds:
            self._body(key)()
        self._device.record().wait()

    def _body(self, key: GraphKey) -> Callable[[], list[Tensor]]:
        """What a graph is made of, over memory that it stays in; until `columns` say otherwise, all rows pad."""
        static = self.columns[: WIDTH * key.requests].view(WIDTH, key.requests)
        static.zero_()
        static[SLOT].fill_(self._rows.scratch)

        def body() -> list[Tensor]:
            if self._taps is not None:
                self._verified(key, static, self._taps)
                return []
            logits, tokens = self.decode(key, static)
            if not key.draws and key.queries == 1:
                self._logits[: key.requests].copy_(logits)
            return [tokens]

        return body

    def _capture(self, key: GraphKey) -> None:
        begin, body, found = perf_counter(), self._body(key), list[Tensor]()

        def recorded() -> None:
            found[:] = body()

        recorded()  # compiles, and sets up what is set up once
        try:
            graph = self._device.capture(recorded)
        except RuntimeError as error:
            said = f"no CUDA graph of {key.requests} rows of {key.queries}: {error}; --enforce-eager does without"
            raise RuntimeError(said) from error
        self._graphs[key] = (graph, found)
        self.capture_seconds += perf_counter() - begin
        self.dispatcher.add(key)


def write_tokens(tokens: Tensor, slots: Tensor, ends: Tensor, sampled: Tensor) -> None:
    """Put sampled tokens behind what their rows have. A failed row may be in the next plan already, so that what it
    holds must be a token id.

    Args:
        tokens: int32 [slots, length].
        slots, ends, sampled: int64 [rows].
    """
    places = slots * tokens.shape[1] + ends
    tokens.view(-1).index_copy_(0, places, sampled.clamp(min=0).to(torch.int32))
