"""The runners of several ranks: the leader's takes plans, the others' do what it tells."""

from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_table import PlanError
from troupellm.models.batch.spans import Spans
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.parallel.decoder import DividedDecoder
from troupellm.models.parallel.orders import Copy, Forward, Inputs, Kind, Logits, Order
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.runner.step import Step


class LeadingRunner(ModelRunner):
    """The leader's runner. It alone knows rows, samples and runs guides."""

    def __init__(self, ranks: Ranks, *parts: Any, **more: Any) -> None:
        """parts, more: as of `ModelRunner`."""
        super().__init__(*parts, **more)
        self._ranks = ranks

    def forward(self, step: Step, spans: Spans, batch: ForwardBatch) -> Tensor:
        """As `ModelRunner.forward`, by all ranks."""
        ends = spans.starts + spans.counts
        width = int(ends.max() - 1) // self.cache.block_size + 1
        wanted = batch.logit_tokens
        order = Forward(
            starts=spans.starts,
            counts=spans.counts,
            token_ids=batch.token_ids.numpy(),
            wanted=None if wanted is None else wanted.numpy(),
            tables=self.rows.blocks[:, spans.slots, :width],
        )
        if batch.inputs is not None:
            self._ranks.tell(Inputs(*batch.inputs).encode())
        self._ranks.tell(order.encode())
        return super().forward(step, spans, batch)


class FollowingRunner(ModelRunner):
    """Another rank's runner. Its row table holds the block tables of the present batch alone."""

    decoder: DividedDecoder

    def __init__(
        self, decoder: DividedDecoder, cache: KVCache, ranks: Ranks, *, max_model_len: int, backend: str = "auto"
    ) -> None:
        super().__init__(decoder, cache, max_model_len=max_model_len, attention_backend=backend)
        self._ranks = ranks
        self._inputs: Inputs | None = None
        """Of the next batch."""

    @torch.inference_mode()
    def follow(self) -> None:
        """Do what the leader tells, until it needs this rank no longer.

        Raises:
            RankLost: another rank has ended.
        """
        while (order := Order(self._ranks.hear())).kind != Kind.END:
            self.execute(order)

    def execute(self, order: Order) -> None:
        """One order."""
        match order.kind:
            case Kind.FORWARD:
                self.decoder.forward(self._told(Forward.decode(order)), self.cache.layers)
            case Kind.INPUTS:
                self._inputs = Inputs.decode(order)
            case Kind.LOGITS:
                self.decoder.give_logits(Logits.decode(order, self.decoder.dtype).hidden)
            case Kind.COPY:
                self.cache.copy(Copy.decode(order).pairs)
            case Kind.SIZES | Kind.END:
                raise PlanError(f"the order {order.kind.name} came in the middle of others")
            case _:
                assert_never(order.kind)

    def _told(self, told: Forward) -> ForwardBatch:
        """The batch of the leader, over this rank's part of the cache."""
        slots = np.arange(told.starts.size)
        spans = Spans(slots, slots, told.starts, told.counts)
        ends = np.cumsum(told.counts)
        owner = np.repeat(slots, told.counts)
        places = np.arange(ends[-1]) - np.repeat(ends - told.counts - told.starts, told.counts)
        self.rows.blocks = told.tables
        inputs, self._inputs = self._inputs, None
        return ForwardBatch(
            token_ids=torch.from_numpy(told.token_ids),
            positions=torch.from_numpy(places),
            groups=self._groups(spans, owner, places, places, None),
            logit_tokens=None if told.wanted is None else torch.from_numpy(told.wanted),
            inputs=None if inputs is None else (inputs.places, inputs.values),
        )
