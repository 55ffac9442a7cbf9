"""The oracle's `WorkerReady`, and the log-probabilities of its tokens."""

from array import array
from collections.abc import Sequence

from simulator.faults import FAILING_TIER
from simulator.model import Language, ranking
from simulator.workload import Scenario
from troupellm.protocol.messages.kv_transfers import TierInfo
from troupellm.protocol.messages.worker import CacheGroup, RowLogprobs, WorkerReady


def worker_ready(scenario: Scenario, language: Language) -> WorkerReady:
    """Blocks are counted per cache group; they are in one pool."""
    pressure = scenario.pressure
    return WorkerReady(
        vocab_width=language.width,
        max_model_len=pressure.max_model_len,
        num_blocks=pressure.num_blocks * len(pressure.windows),
        block_size=pressure.block_size,
        step_tokens=scenario.config.scheduler.max_num_batched_tokens,
        groups=tuple(CacheGroup(num_layers=1, sliding_window=window) for window in pressure.windows),
        dtype="float32",
        device="cpu",
        architecture="Oracle",
        num_parameters=0,
        weight_bytes=0,
        kv_cache_bytes=0,
        activation_bytes=0,
        memory_free_bytes=0,
        load_seconds=0.0,
        max_loras=pressure.loras,
        most_drafts=pressure.drafts,
        state_slots=pressure.state_slots,
        host_slots=pressure.host_slots,
        tiers=tuple(
            TierInfo(name=name, failure_policy="fail" if name == FAILING_TIER else "recompute")
            for name in pressure.outer
        ),
    )


def describe(row: int, position: int, drawn: Sequence[tuple[int, int]], alternatives: int) -> RowLogprobs:
    """Of consecutive tokens, each with the state behind which it was drawn, and the likeliest ones there."""
    columns: list[tuple[float, int]] = []
    ranks: list[int] = []
    for state, token in drawn:
        ranked = ranking(state)
        rank = next(place for place, (_, other) in enumerate(ranked) if other == token)
        columns += [ranked[rank], *ranked[:alternatives]]
        ranks.append(rank + 1)
    return RowLogprobs(
        row=row,
        position=position,
        width=len(columns) // len(ranks),
        token_ids=array("i", [other for _, other in columns]).tobytes(),
        logprobs=array("f", [logprob for logprob, _ in columns]).tobytes(),
        ranks=array("i", ranks).tobytes(),
    )
