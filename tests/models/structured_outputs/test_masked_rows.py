"""Plain rows of which guides mask some tokens, or all: compiled code and torch choose alike, and say alike why not."""

import pytest
import torch

from troupellm.kernels.sampling import cpu
from troupellm.kernels.sampling.adjust import unpacked
from troupellm.kernels.sampling.cases import VOCAB, make_logits
from troupellm.models.sampling.masks import TokenMasks
from troupellm.models.sampling.sampler import Sampled, Sampler
from troupellm.protocol.messages.worker import RowError, SamplingState
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code

ROWS = (30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 39, 39)
"""The last one has drafts."""
GUIDED = (0, 2, 3, 4, 5, 6, 7, 9, 10)
CLOSED, SILENT, BROKEN, EMPTY = 3, 4, 6, 8
"""Of those: rows whose masks leave nothing, with a reason and without; then those whose logits are of no use."""
STATES = {
    "likeliest": [SamplingState(temperature=0.0)],
    "drawn": [SamplingState(), SamplingState(temperature=2.0), SamplingState(temperature=0.05)],
    "min_p": [SamplingState(min_p=0.05), SamplingState(min_p=0.5, temperature=1.5)],
    "mixed": [SamplingState(), SamplingState(temperature=0.0), SamplingState(min_p=0.1)],
}


def step(states: list[SamplingState], masks: TokenMasks | None) -> Sampled:
    sampler = Sampler(VOCAB, torch.device("cpu"))
    for row in set(ROWS):
        sampler.add_row(row, states[row % len(states)], [3, 8, 20], 3)
    assert sampler.plain.slots(ROWS) is not None
    logits = make_logits(len(ROWS), VOCAB, 3.0, seed=17)
    logits[BROKEN, 5], logits[EMPTY] = torch.nan, -torch.inf
    positions = [9 + i for i in range(len(ROWS))]
    return sampler.sample(logits, ROWS, positions, [torch.arange(position) for position in positions], masks)


@pytest.mark.parametrize("name", STATES)
def test_masks_mean_the_same_to_compiled_code_and_to_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiled_code()
    assert cpu.compiled() is not None
    bits = torch.randint(-(2**31), 2**31, (len(GUIDED), -(-VOCAB // 32)), generator=torch.Generator().manual_seed(3))
    bits = bits.int()
    for row in (CLOSED, SILENT):
        bits[GUIDED.index(row)] = 0
    reasons = {i: RowError(ROWS[i], f"the grammar of {i} leaves nothing") for i in (0, CLOSED, BROKEN)}
    masks = TokenMasks(torch.tensor(GUIDED), bits, reasons)

    compiled, free = step(STATES[name], masks), step(STATES[name], None)
    monkeypatch.setattr(cpu, "compiled", lambda: None)
    by_torch = step(STATES[name], masks)

    assert compiled.values == by_torch.values
    assert compiled.errors == by_torch.errors
    assert [error.row for error in compiled.errors] == [ROWS[i] for i in (CLOSED, SILENT, BROKEN, EMPTY)]
    closed, silent, broken, empty = compiled.errors
    assert closed == reasons[CLOSED]
    assert "no token is left" in silent.message
    assert "NaN or infinite logits" in broken.message
    assert broken.message == empty.message
    allowed = unpacked(bits, VOCAB)
    for i, token in enumerate(compiled.values):
        if i in (CLOSED, SILENT, BROKEN, EMPTY):
            assert token == -1
        elif i in GUIDED:
            assert allowed[GUIDED.index(i), token]
        else:
            assert token == free.values[i]
