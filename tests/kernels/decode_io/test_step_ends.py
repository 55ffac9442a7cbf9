"""The beginning and the end of a decode step, row by row and token by token."""

import pytest
import torch

from troupellm.kernels.decode_io import begin, finish
from troupellm.kernels.decode_io.cases import CASES, Case, make_inputs
from troupellm.kernels.sampling import draw
from troupellm.kernels.sampling.noise import position_keys
from troupellm.kernels.sampling.truncate import thresholds

EACH = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


@EACH
def test_the_beginning_of_a_step_gathers_tokens_and_places(case: Case) -> None:
    made = make_inputs(case, "cpu", 1)
    got = begin(
        made.slots,
        made.ends,
        made.counts,
        made.texts,
        made.block_tables,
        made.angle_table,
        queries=case.queries,
        block_size=case.block_size,
        kv_heads=case.kv_heads,
        scratch=made.scratch,
    )
    counts = case.counts or (case.queries,) * len(case.ends)
    slots, positions = [], []
    for slot, end, count in zip(made.slots.tolist(), case.ends, counts, strict=True):
        for before in range(case.queries, 0, -1):
            slots.append(slot if before <= count else made.scratch)
            positions.append(max(end - before, 0))
    assert got.positions.tolist() == positions
    assert got.token_ids.tolist() == made.texts[slots, positions].tolist()
    assert got.context_lens.tolist() == list(case.ends)
    assert got.starts.tolist() == [case.queries * row for row in range(len(case.ends) + 1)]
    if made.angle_table is not None:
        assert torch.equal(got.angles, made.angle_table[positions])
    assert torch.equal(got.tables, made.block_tables[:, made.slots])
    for group in range(case.groups):
        rows = []
        for slot, position in zip(slots, positions, strict=True):
            block = int(made.block_tables[group, slot, position // case.block_size])
            place = position % case.block_size
            rows += [(block * case.kv_heads + head) * case.block_size + place for head in range(case.kv_heads)]
        assert got.kv_rows[group].tolist() == rows


@EACH
def test_the_end_of_a_step_draws_and_appends_tokens(case: Case) -> None:
    made = make_inputs(case, "cpu", 2)
    texts = made.texts.clone()
    got = finish(made.logits, made.slots, made.ends, texts, made.draws).tolist()
    expected = []
    for row, logits in enumerate(made.logits):
        peak = float(logits.max())
        token = -1 if not abs(peak) < float("inf") else int((logits == peak).nonzero()[0])
        if made.draws is not None and token >= 0 and (factor := float(made.draws.scales[row, 0])) > 0:
            scaled = (logits - peak) * factor
            scaled[scaled < made.draws.scales[row, 1]] = float("-inf")
            if made.draws.nucleus is not None:
                own = made.draws.nucleus.take(torch.tensor([row]))
                scaled[scaled < thresholds(scaled[None], own)[0]] = float("-inf")
            keys = position_keys(made.draws.streams[row : row + 1], made.ends[row : row + 1])
            token = int(draw(scaled[None], keys, made.draws.codes))
        expected.append(token)
        made.texts[made.slots[row], made.ends[row]] = max(token, 0)
    assert got == expected
    assert torch.equal(texts, made.texts)
