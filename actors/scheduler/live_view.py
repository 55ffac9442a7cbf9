"""The scheduler's part of the picture that the page draws: every sequence with why it waits, the map of KV blocks, and
the share of each API key. Reads only."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, groupby

import msgspec

from troupellm.actors.kv_cache.block_pool import BlockPool
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.sequences.sequence import Sequence, State
from troupellm.protocol.messages.live_view import (
    CACHED,
    FREE,
    IN_USE,
    MOST_CELLS,
    MOST_KEYS,
    MOST_REQUESTS,
    NUM_COLOURS,
    OWNERS,
    SHARED,
    KeyView,
    RequestView,
    SchedulerView,
)

MOST_OWNED_BLOCKS = 20_000
"""Blocks in use that are looked at one by one for their owners; beyond it cells show only that they are in use."""
_WAITING = frozenset({State.WAITING, State.PREEMPTED})
_READER = "its reader is slow"


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """The causes that hold waiting sequences back, as the planner last saw them."""

    now: float
    halted: bool
    """Nothing is planned, by request."""
    restarting: bool
    """The worker is gone."""
    rows_full: bool
    """As many sequences run as may."""
    blocked: Sequence | None
    """The first waiting sequence, if it did not get enough blocks."""
    adapter_rows: frozenset[int]
    """Rows that wait for an adapter."""
    suspects: bool
    """Requests are tried out one after the other, since one of them is suspected of having killed the worker."""


def view_of(core: SchedulerCore, now: float) -> SchedulerView:
    """The picture of a core: the one reader of its parts, which it has no line for."""
    planner, gate = core._planner, core.adapters
    around = Circumstances(
        now=now,
        halted=core.pause_control.halted,
        restarting=core._replay.reason is not None,
        rows_full=core._running_set.num_rows >= core._config.max_num_seqs,
        blocked=planner._blocked,
        adapter_rows=frozenset() if gate is None else frozenset([sequence.row for sequence in gate.held]),
        suspects=core._quarantine.members is not None,
    )
    return scheduler_view(core._open.sequences, core._tables.pool, planner._fair_share, around)


def scheduler_view(
    sequences: Mapping[int, Sequence], pool: BlockPool, fair_share: FairShare, around: Circumstances
) -> SchedulerView:
    """
    Args:
        sequences: open ones, by row, oldest first.
    """
    shown = [sequence for sequence in sequences.values() if not sequence.ended]
    waiting = Counter(sequence.request.tenant for sequence in shown if sequence.state in _WAITING)
    names = sorted({*fair_share.running, *waiting})[:MOST_KEYS]
    places = {name: place for place, name in enumerate(names)}
    per_cell = max(1, -(-pool.num_blocks // MOST_CELLS))
    reasons = {"": 0}
    rows = tuple([_row(sequence, places, reasons, around) for sequence in selection(shown)])
    return SchedulerView(
        requests=rows,
        reasons=tuple(reasons),
        hidden=max(0, len(shown) - MOST_REQUESTS),
        keys=tuple(
            [
                KeyView(name, fair_share.running.get(name, 0), waiting[name], round(fair_share.served(name), 1))
                for name in names
            ]
        ),
        cells=run_lengths(_cells(shown, pool, per_cell)),
        blocks_per_cell=per_cell,
    )


def selection(sequences: list[Sequence]) -> list[Sequence]:
    """The rows of the table. Where there are too many, running and waiting ones have half of it each, or what the
    others leave; the oldest of both come first."""
    if len(sequences) <= MOST_REQUESTS:
        return sequences
    running = [sequence for sequence in sequences if sequence.state is State.RUNNING]
    others = [sequence for sequence in sequences if sequence.state is not State.RUNNING]
    num_running = min(len(running), max(MOST_REQUESTS // 2, MOST_REQUESTS - len(others)))
    return running[:num_running] + others[: MOST_REQUESTS - num_running]


def run_lengths(cells: Iterable[int]) -> tuple[int, ...]:
    """A value and how often it comes, and so on."""
    return tuple(chain.from_iterable((value, sum(1 for _ in run)) for value, run in groupby(cells)))


def why(sequence: Sequence, around: Circumstances) -> str:
    """Why a sequence does not run; empty where it does."""
    state, request = sequence.state, sequence.request
    if state is State.RUNNING:
        return "the worker restarts" if around.restarting else "the engine is paused" if around.halted else ""
    if state is State.PAUSED or request.paused:
        return _READER
    if state is State.LOADING:
        return "its KV blocks are loaded from a tier"
    if state is State.HELD:
        return "its adapter needs a slot" if sequence.row in around.adapter_rows else "its grammar is compiled"
    if around.restarting:
        return "the worker restarts"
    if around.halted:
        return "the engine is paused"
    if sequence is not request.sequences[0] and not request.prompt_computed:
        return "its first sequence computes the prompt"
    if around.suspects:
        return "suspects of a crash are tried out"
    if around.rows_full:
        return "the batch is full"
    if sequence is around.blocked:
        return "no KV blocks are free"
    if around.blocked is not None:
        return "the request before it needs KV blocks"
    return "preempted: KV blocks were needed" if sequence.was_preempted else "its turn in the token budget"


def _row(sequence: Sequence, places: Mapping[str, int], reasons: dict[str, int], around: Circumstances) -> RequestView:
    """A new reason gets the next place in `reasons`."""
    request, first = sequence.request, sequence.request.first_token
    state = sequence.state.value
    if sequence.state is State.RUNNING:
        state = "prefill" if sequence.num_computed < sequence.num_prompt_tokens else "decode"
    return RequestView(
        number=request.number,
        state=state,
        why=reasons.setdefault(why(sequence, around), len(reasons)),
        key=places.get(request.tenant, -1),
        prompt_tokens=sequence.num_prompt_tokens,
        computed=sequence.num_computed,
        generated=sequence.num_generated,
        blocks=sum([len(table) for table in sequence.tables]),
        age_ms=max(0, round((around.now - request.arrival) * 1_000)),
        first_token_ms=None if first is None else max(0, round((first - request.arrival) * 1_000)),
    )


def _cells(sequences: list[Sequence], pool: BlockPool, per_cell: int) -> bytearray:
    """One block of each cell stands for it."""
    cells = bytearray(-(-pool.num_blocks // per_cell))
    for cell in range(len(cells)):
        block = cell * per_cell
        references = pool.references(block)
        if references:
            cells[cell] = SHARED if references > 1 else IN_USE
        else:
            cells[cell] = FREE if pool.key_of(block) is None else CACHED
    if pool.num_blocks - pool.num_available > MOST_OWNED_BLOCKS:
        return cells
    owned = {block for block in range(0, pool.num_blocks, per_cell) if cells[block // per_cell] == IN_USE}
    for sequence in sequences:
        if sequence.state in _WAITING:
            continue
        colour = OWNERS + sequence.request.number % NUM_COLOURS
        for block in owned.intersection(chain.from_iterable(sequence.tables)):
            cells[block // per_cell] = colour
    return cells
