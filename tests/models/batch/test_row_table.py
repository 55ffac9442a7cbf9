"""The worker's state of its rows between steps."""

import msgspec
import numpy as np
import pytest

from troupellm.models.batch.row_table import PlanError, RowTable
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan


def new_row(row: int, epoch: int, **sampling: int) -> NewRow:
    return NewRow(
        row=row,
        epoch=epoch,
        request_id=str(row),
        token_ids=np.arange(6, dtype="<i4").tobytes(),
        num_prompt_tokens=6,
        sampling=SamplingState(**sampling),
        blocks=((2 * row, 2 * row + 1),),
    )


def slots_of(table: RowTable, *epochs: int, start: int = 5, count: int = 1) -> list[int]:
    """Of rows 0, 1, ... in a plan that computes the same positions of each."""
    rows = tuple(range(len(epochs)))
    starts, counts = (start,) * len(rows), (count,) * len(rows)
    plan = StepPlan(step=7, engine_epoch=0, rows=rows, epochs=epochs, starts=starts, counts=counts)
    return table.slots_of(plan, np.array(starts), np.array(counts)).tolist()


@pytest.fixture
def table() -> RowTable:
    table = RowTable(max_model_len=16, block_size=4)
    table.add(new_row(0, 0))
    table.add(new_row(1, 0))
    return table


def test_rows_that_left_and_came_back_are_found_where_they_lie_now(table: RowTable) -> None:
    before = slots_of(table, 0, 0)
    assert slots_of(table, 0, 0) == before == [table.slot(0), table.slot(1)]
    table.drop(1)
    with pytest.raises(PlanError, match="row 1 is not known"):
        slots_of(table, 0, 0)
    table.drop(0)
    table.add(new_row(1, 1))
    table.add(new_row(0, 1))
    assert slots_of(table, 1, 1) == before[::-1] == [table.slot(0), table.slot(1)]


def test_a_plan_that_does_not_fit_is_refused_by_name(table: RowTable) -> None:
    assert slots_of(table, 0, 0, start=0, count=6) == slots_of(table, 0, 0)
    with pytest.raises(PlanError, match="row 1: wrong epoch in step 7"):
        slots_of(table, 0, 1)
    with pytest.raises(PlanError, match="row 0: wrong count of tokens"):
        slots_of(table, 0, 0, count=0)
    with pytest.raises(PlanError, match="row 0: wrong span beyond its tokens"):
        slots_of(table, 0, 0, start=6)
    table.drop_blocks(1, 1)
    with pytest.raises(PlanError, match="row 1: wrong span beyond its blocks"):
        slots_of(table, 0, 0)


def test_the_table_knows_whether_any_prompt_is_described(table: RowTable) -> None:
    assert not table.wants_prompt_logprobs
    table.add(new_row(2, 0, prompt_logprobs=1))
    table.set_sampling(1, SamplingState(prompt_logprobs=0))
    assert table.wants_prompt_logprobs
    table.drop(2)
    assert table.wants_prompt_logprobs
    table.set_sampling(1, SamplingState())
    assert not table.wants_prompt_logprobs


def test_the_table_counts_rows_with_adapters_through_epochs_and_ends(table: RowTable) -> None:
    assert table.adapted == 0
    table.add(msgspec.structs.replace(new_row(2, 0), adapter=3))
    table.add(msgspec.structs.replace(new_row(0, 1), adapter=1))
    assert table.adapted == 2
    assert table.adapters[[table.slot(row) for row in range(3)]].tolist() == [1, 0, 3]
    table.add(msgspec.structs.replace(new_row(2, 1), adapter=2))
    assert table.adapted == 2
    table.add(new_row(0, 2))
    assert table.adapted == 1
    table.drop(2)
    assert table.adapted == 0
    table.add(new_row(3, 0))
    assert table.adapters[table.slot(3)] == 0
