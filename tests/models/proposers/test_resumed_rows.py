"""Rows go on drafting behind what their drafter was not shown, with true entries only.

Unwritten entries of the bench's cache are NaN: a drafter that reads one drafts something else.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from troupellm.models.batch.row_drafts import ROOT
from troupellm.models.proposers.paged_missing_kv import MissingKV
from troupellm.models.proposers.paged_proposer import PagedProposer
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH, write_tiny_model
from troupellm.tests.support.engines.inside import hidden_states_of, marks_of
from troupellm.tests.support.speculation import plain_heads
from troupellm.tests.support.speculation.draft_bench import BLOCK, DraftBench, Row
from troupellm.tests.support.speculation.plain_heads import (
    CONFIG,
    CONFIG3,
    DRAFT_VOCABULARY,
    eagle3_weights,
    eagle_weights,
)

MOST = 3
States = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[torch.Tensor, list[int], torch.Tensor], torch.Tensor]
"""Outputs of a head at some positions: of states there, the tokens behind them, and the positions."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("resumed") / "target")


def eagle(target: Path, folder: Path, widths: tuple[int, ...] = ()) -> tuple[DraftBench, States, Step, States]:
    """A bench, and in plain torch: states from what is tapped, the head, scores from its outputs."""
    weights = eagle_weights()
    config = SpeculativeConfig(
        method="eagle", model=str(plain_heads.write_head(folder, weights, CONFIG)), tree_widths=widths
    )
    bench = DraftBench(target, config)

    def step(states: torch.Tensor, tokens: list[int], positions: torch.Tensor) -> torch.Tensor:
        return plain_heads.eagle(weights, bench.decoder.embedding.table, states, tokens, 1, positions)

    return bench, bench.decoder.normed, step, bench.decoder.scores


def eagle3(target: Path, folder: Path) -> tuple[DraftBench, States, Step, States]:
    weights = eagle3_weights()
    bench = DraftBench(target, SpeculativeConfig(model=str(plain_heads.write_head(folder, weights, CONFIG3))))
    ids = weights["d2t"] + torch.arange(DRAFT_VOCABULARY)

    def step(states: torch.Tensor, tokens: list[int], positions: torch.Tensor) -> torch.Tensor:
        return plain_heads.eagle3(weights, bench.decoder.embedding.table, states, tokens, positions)

    def score(states: torch.Tensor) -> torch.Tensor:
        found = torch.full((states.shape[0], LOGITS_WIDTH), -torch.inf)
        found[:, ids] = plain_heads.normed(states, weights["norm.weight"]) @ weights["lm_head.weight"].T
        return found

    return bench, lambda aux: aux @ weights["fc.weight"].T, step, score


def text(count: int) -> list[int]:
    found: list[int] = np.random.default_rng(5).integers(0, 250, count).tolist()
    return found


def whole_blocks(row: Row) -> list[int]:
    """Positions that a row has entries of when its drafter falls asleep, but for those of the last block."""
    return list(range(row.computed // BLOCK * BLOCK))


@pytest.mark.parametrize("make", [eagle, eagle3])
def test_rows_draft_from_what_was_seen_before_and_after(
    target: Path, tmp_path: Path, make: Callable[[Path, Path], tuple[DraftBench, States, Step, States]]
) -> None:
    bench, states_of, head, score = make(target, tmp_path / "head")
    before: dict[int, list[int]] = {}
    begin: dict[int, int] = {}
    checked: list[tuple[int, int]] = []

    @torch.inference_mode()
    def check(row: Row, drafts: list[int]) -> None:
        places = [*before.get(row.slot, []), *range(begin.get(row.slot, 0), len(row.tokens) - 1)]
        states = states_of(bench.aux(row.tokens[:-1]))[places]
        tokens = [row.tokens[place + 1] for place in places]
        assert len(drafts) == MOST
        for draft in drafts:
            found = head(states, tokens, torch.tensor(places))[-1:]
            assert draft == int(score(found).argmax())
            states, tokens, places = torch.cat((states, found)), [*tokens, draft], [*places, places[-1] + 1]
        checked.append((row.slot, len(begin)))

    bench.add(0, text(10), range(40))
    bench.add(3, text(33)[10:], range(40, 80))
    for _ in range(6):
        bench.step(MOST, 6, check)
    for sleep in range(2):
        for row in bench.rows:
            before.setdefault(row.slot, whole_blocks(row))
        for _ in range(9):
            bench.step(0, 6, shown=False)
        if not sleep:
            bench.add(1, text(53)[33:], range(80, 120))  # its prompt begins unseen
            before[1] = []
            for _ in range(2):
                bench.step(0, 6, shown=False)
        begin = {row.slot: row.computed for row in bench.rows}
        bench.step(0, 6)
        for _ in range(6):
            bench.step(MOST, 6, check)
    assert {slot for slot, rows in checked if rows} == {0, 1, 3}
    assert len(checked) > 30


@pytest.mark.parametrize("make", [eagle, eagle3])
@pytest.mark.parametrize(
    ("shown", "before"),
    [
        ((True, True, True, True), [range(24)]),
        ((True, False, True, True), [range(8), range(16, 24)]),
        ((False, True, True, True), [range(8, 24)]),
        ((True, True, False, False), [range(16)]),
        ((False, False, False, False), []),
    ],
)
def test_shared_blocks_count_where_somebody_was_followed_who_wrote_them(
    target: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], tuple[DraftBench, States, Step, States]],
    shown: tuple[bool, ...],
    before: list[range],
) -> None:
    bench, states_of, head, score = make(target, tmp_path / "head")
    words = text(50)
    first = bench.add(0, words[:30], range(40))
    for is_shown in shown:
        bench.step(0, 8, shown=is_shown)
    bench.drop(first)
    checked: list[int] = []

    @torch.inference_mode()
    def check(row: Row, drafts: list[int]) -> None:
        places = [*(place for part in before for place in part), *range(24, len(row.tokens) - 1)]
        states = states_of(bench.aux(row.tokens[:-1]))[places]
        tokens = [row.tokens[place + 1] for place in places]
        assert len(drafts) == MOST
        for draft in drafts:
            found = head(states, tokens, torch.tensor(places))[-1:]
            assert draft == int(score(found).argmax())
            states, tokens, places = torch.cat((states, found)), [*tokens, draft], [*places, places[-1] + 1]
        checked.append(row.slot)

    # Its first 24 tokens are the same, in the same blocks.
    bench.add(1, words[:24] + words[40:47], [*range(6), *range(40, 74)], computed=24)
    for _ in range(4):
        bench.step(MOST, 8, check)
    assert checked == [1, 1, 1]


@pytest.mark.parametrize("make", [eagle, eagle3])
@pytest.mark.parametrize(
    ("steps", "shared", "before"),
    [
        # It goes on at 14, in the third place of a block, and each of its entries lies two places before its own.
        (((8, True), (6, False), (8, True), (2, True)), 24, 8),
        # The other row begins inside a block, whose beginning is a copy.
        (((8, False),) * 4, 26, 0),
    ],
)
def test_places_that_nobody_wrote_are_not_read_by_those_who_share_them(
    target: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], tuple[DraftBench, States, Step, States]],
    steps: tuple[tuple[int, bool], ...],
    shared: int,
    before: int,
) -> None:
    bench, states_of, head, score = make(target, tmp_path / "head")
    words = text(50)
    first = bench.add(0, words[:30], range(40))
    for chunk, is_shown in steps:
        bench.step(0, chunk, shown=is_shown)
    bench.drop(first)
    bench.cache.copy([(shared // BLOCK, 100)])
    begin = -(-shared // BLOCK) * BLOCK
    checked: list[int] = []

    @torch.inference_mode()
    def check(row: Row, drafts: list[int]) -> None:
        places = [*range(before), *range(begin, len(row.tokens) - 1)]
        states = states_of(bench.aux(row.tokens[:-1]))[places]
        tokens = [row.tokens[place + 1] for place in places]
        assert len(drafts) == MOST
        for draft in drafts:
            found = head(states, tokens, torch.tensor(places))[-1:]
            assert draft == int(score(found).argmax())
            states, tokens, places = torch.cat((states, found)), [*tokens, draft], [*places, places[-1] + 1]
        checked.append(row.slot)

    blocks = [*range(shared // BLOCK), *range(100, 140 - shared // BLOCK)]
    bench.add(1, words[:shared] + words[40:45], blocks, computed=shared)
    for _ in range(4):
        bench.step(MOST, 8, check)
    assert checked == [1, 1, 1]
    assert isinstance(bench.proposer, PagedProposer)
    assert bool(hidden_states_of(bench.proposer)[1].isfinite().all())
    marks = marks_of(bench.proposer)
    assert marks is not None
    _, trail = marks.runs(bench.blocks, np.array([1]), np.array([8]))
    assert trail.tolist() == [begin // BLOCK], "what it wrote may be read by others"


def test_where_blocks_are_kept_for_a_window_who_goes_on_behind_a_bare_copy_begins_with_a_block(
    target: Path, tmp_path: Path
) -> None:
    bench, *_ = eagle(target, tmp_path / "head")
    assert isinstance(bench.proposer, PagedProposer)
    gaps = bench.proposer._paging.gaps = MissingKV(BLOCK, whole=False)
    words = text(50)
    first = bench.add(0, words[:30], range(40))
    for _ in range(4):
        bench.step(0, 8, shown=False)
    bench.drop(first)
    bench.cache.copy([(6, 100)])
    bench.add(1, words[:26] + words[40:46], [*range(6), *range(100, 134)], computed=26)
    bench.step(0, 1)
    bench.step(0, 4)
    assert gaps.shift(np.array([1])).tolist() == [28]


def test_trees_grow_behind_a_gap_beside_rows_without_one(target: Path, tmp_path: Path) -> None:
    widths = (3, 4, 5)
    bench, states_of, head, score = eagle(target, tmp_path / "head", widths)
    row = bench.add(0, text(10), range(40))
    for _ in range(3):
        bench.step(0, 10)
    before = whole_blocks(row)
    for _ in range(7):
        bench.step(0, 10, shown=False)
    begin = row.computed
    other = bench.add(1, text(22)[10:], range(40, 80))
    for _ in range(4):
        bench.step(0, 10)
    drafts = bench.propose([row, other], [sum(widths)] * 2)
    assert drafts.parents is not None
    seen = [*before, *range(begin, len(row.tokens) - 1)], list(range(len(other.tokens) - 1))
    for index, (each, places) in enumerate(zip((row, other), seen, strict=True)):
        found: dict[int, tuple[int, ...]] = {ROOT: ()}
        for node in range(int(drafts.counts[index])):
            found[node] = (*found[int(drafts.parents[index, node])], int(drafts.token_ids[index, node]))
        assert set(found.values()) == likeliest(bench, each, places, states_of, head, score, widths)


@torch.inference_mode()
def likeliest(
    bench: DraftBench,
    row: Row,
    places: list[int],
    states_of: States,
    head: Step,
    score: States,
    widths: tuple[int, ...],
) -> set[tuple[int, ...]]:
    """Paths of a tree that the head grows by itself, from entries at some positions of a row."""
    first = states_of(bench.aux(row.tokens[:-1]))[places]

    def shares(path: tuple[int, ...]) -> torch.Tensor:
        states, at, tokens = first, list(places), [row.tokens[place + 1] for place in places]
        for token in path:
            states = torch.cat((states, head(states, tokens, torch.tensor(at))[-1:]))
            tokens, at = [*tokens, token], [*at, at[-1] + 1]
        return score(head(states, tokens, torch.tensor(at))[-1:])[0].log_softmax(-1)

    level: dict[tuple[int, ...], float] = {(): 0.0}
    every = set(level)
    for width in widths:
        grown = {}
        for path, joint in level.items():
            best = shares(path).topk(width)
            grown |= {(*path, int(token)): joint + float(share) for share, token in zip(*best, strict=True)}
        level = dict(sorted(grown.items(), key=lambda entry: -entry[1])[:width])
        every |= set(level)
    return every


def test_blocks_between_are_passed_over() -> None:
    gaps, slots = MissingKV(4, whole=True), np.array([1, 0])
    for slot in (0, 1):
        gaps.close(slot)
    assert not gaps.some
    gaps.open(slots[:1], np.array([9]), np.array([18]))
    blocks = np.arange(20, dtype=np.int32).reshape(2, 10)
    assert gaps.some
    assert gaps.shift(slots).tolist() == [10, 0]
    assert gaps.table(blocks, slots, 4).tolist() == [[10, 11, 14, 15], [0, 1, 2, 3]]
    gaps.open(slots[:1], np.array([20]), np.array([33]))
    assert gaps.shift(slots).tolist() == [25, 0], "what is before the first gap stays"
    assert gaps.table(blocks, slots, 4).tolist() == [[10, 11, 18, 19], [0, 1, 2, 3]]
    gaps.close(1)
    assert not gaps.some
    assert gaps.table(blocks, slots, 4).tolist() == [[10, 11, 12, 13], [0, 1, 2, 3]]


def test_where_blocks_are_kept_for_a_window_rows_begin_anew_with_a_block() -> None:
    gaps, slots = MissingKV(4, whole=False), np.zeros(1, dtype=np.int64)
    gaps.close(0)
    assert gaps.may_open(np.array([7, 8])).tolist() == [False, True]
    gaps.open(slots, np.array([6]), np.array([8]))
    assert gaps.shift(slots).tolist() == [8]
    assert gaps.table(np.arange(10, dtype=np.int32)[None], slots, 3).tolist() == [[2, 3, 4]]
