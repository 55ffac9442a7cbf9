"""The entries that a draft model keeps of rows behind shared blocks, counted by the drafts that are kept.

It drafts for itself, so that every draft is kept whose row's tokens it has all read. Unwritten entries are NaN.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from draft_bench import BLOCK, DraftBench, Row
from tiny_model import write_tiny_model
from torch import Tensor

from troupellm.models.layers.attention import KVPair
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.proposers import paged_drafter_blocks
from troupellm.models.proposers.paged_proposer import PagedProposer
from troupellm.protocol.config.speculation import SpeculativeConfig

MOST, CHUNK = 3, 8
WORDS: list[int] = np.random.default_rng(6).integers(0, 250, 60).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("shared") / "target")


@pytest.fixture
def bench(target: Path) -> DraftBench:
    return DraftBench(target, SpeculativeConfig(method="draft_model", model=str(target)))


def write(bench: DraftBench, shown: tuple[bool, ...]) -> Row:
    """A row in blocks 0, 1, 2, ... that is gone again."""
    row = bench.add(0, WORDS[:22], range(40))
    for is_shown in shown:
        bench.step(0, CHUNK, shown=is_shown)
    bench.drop(row)
    return row


def kept(bench: DraftBench, slot: int, before: list[int], blocks: list[int]) -> list[int]:
    """Kept drafts of a row that shares what is before it, proposal by proposal."""
    own = range(40 * (slot + 1), 40 * (slot + 2) - len(blocks))
    row = bench.add(slot, before + WORDS[30 + 6 * slot :][:6], [*blocks, *own], computed=len(before))
    found = [drafts for _ in range(5) for drafts in bench.step(MOST, CHUNK)]
    bench.drop(row)
    return found


@pytest.mark.parametrize("shown", [(True,) * 3, (False, True, True), (True, False, True), (False,) * 3])
def test_blocks_of_a_row_that_was_not_drafted_for_are_read_before_others_draft_behind_them(
    bench: DraftBench, shown: tuple[bool, ...]
) -> None:
    row = write(bench, shown)
    assert row.computed >= 16
    assert kept(bench, 1, WORDS[:16], [0, 1, 2, 3]) == [MOST] * 4


def test_a_row_that_was_not_drafted_for_itself_reads_what_it_shares_when_it_is(bench: DraftBench) -> None:
    write(bench, (False,) * 3)
    bench.add(1, WORDS[:16] + WORDS[30:36], [0, 1, 2, 3, *range(40, 76)], computed=16)
    for _ in range(4):
        bench.step(0, CHUNK, shown=False)
    assert [drafts for _ in range(4) for drafts in bench.step(MOST, CHUNK)] == [MOST] * 4


def test_the_end_of_an_answer_is_read_by_whoever_goes_on_from_it(bench: DraftBench) -> None:
    row = write(bench, (True,) * 6)
    end = len(row.tokens) - 1
    assert end % BLOCK, "it ends inside a block"
    full = end // BLOCK
    bench.cache.copy([(full, 39)])
    assert kept(bench, 1, row.tokens[:end], [*range(full), 39]) == [MOST] * 4


def reads(bench: DraftBench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the positions that the draft model reads from now on."""
    proposer = bench.proposer
    assert isinstance(proposer, PagedProposer)
    network, read = proposer._network, list[int]()
    forward = network.forward

    def counted(batch: ForwardBatch, states: Tensor | None, caches: list[KVPair]) -> Tensor:
        read.extend(batch.positions.tolist())
        return forward(batch, states, caches)

    monkeypatch.setattr(network, "forward", counted)
    return read


def test_blocks_that_were_read_once_are_not_read_again(bench: DraftBench, monkeypatch: pytest.MonkeyPatch) -> None:
    write(bench, (False,) * 3)
    read = reads(bench, monkeypatch)
    kept(bench, 1, WORDS[:16], [0, 1, 2, 3])
    assert min(read) == 0
    read.clear()
    assert kept(bench, 2, WORDS[:16], [0, 1, 2, 3]) == [MOST] * 4
    assert min(read) == 16


def test_of_many_blocks_without_entries_the_last_ones_are_read(
    bench: DraftBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step waits for it. Earlier tokens are passed over, and so are those that were read already."""
    write(bench, (False,) * 3)
    monkeypatch.setattr(paged_drafter_blocks, "MOST_READ", 2 * BLOCK)
    read = reads(bench, monkeypatch)
    assert len(kept(bench, 1, WORDS[:16], [0, 1, 2, 3])) == 4
    assert min(read) == 8
    read.clear()
    assert len(kept(bench, 2, WORDS[:16], [0, 1, 2, 3])) == 4
    assert min(read) == 16
    assert isinstance(bench.proposer, PagedProposer)
    assert bool(bench.proposer._states[1:3].isfinite().all())


def test_where_blocks_are_read_again_and_what_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_drafter_blocks, "MOST_READ", 4 * 16 * 3)  # three blocks of each row that lacks any
    lead, trail, whole = np.array([9, 6, 0, 2, 0]), np.array([0, 9, 9, 6, 8]), np.array([9, 9, 9, 9, 9])
    begin, behind = paged_drafter_blocks.reread(lead, trail, whole, 16)
    assert begin.tolist() == [9, 6, 6, 9, 6]
    assert behind.tolist() == [9, 6, 6, 6, 6]


def test_a_copy_of_a_block_is_as_good_as_the_block(bench: DraftBench, monkeypatch: pytest.MonkeyPatch) -> None:
    write(bench, (True,) * 3)
    bench.cache.copy([(block, 190 + block) for block in range(4)])
    for storage in bench.cache.storages:
        storage[:, :, :4].fill_(torch.nan)
    read = reads(bench, monkeypatch)
    assert kept(bench, 1, WORDS[:16], [190, 191, 192, 193]) == [MOST] * 4
    assert min(read) == 16


def test_a_block_that_was_written_to_since_is_read_again(bench: DraftBench) -> None:
    write(bench, (True,) * 3)
    other = bench.add(0, WORDS[30:52], range(40))  # in the same blocks
    for _ in range(3):
        bench.step(0, CHUNK, shown=False)
    bench.drop(other)
    assert kept(bench, 1, WORDS[30:46], [0, 1, 2, 3]) == [MOST] * 4
