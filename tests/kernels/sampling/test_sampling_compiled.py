"""Sampling by compiled code is sampling by torch."""

import numpy as np
import pytest
import torch

from troupellm.kernels.cpp import Library
from troupellm.kernels.sampling import cpu, draw
from troupellm.kernels.sampling.adjust import keep_bits
from troupellm.kernels.sampling.cases import make_logits
from troupellm.kernels.sampling.cpu import Columns
from troupellm.kernels.sampling.noise import position_keys, token_codes
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code

CPU = torch.device("cpu")
WIDTHS = [1, 2, 15, 16, 17, 33, 2048, 30_011]
ROWS = 70


@pytest.fixture(autouse=True)
def _compiled():
    """Else torch would be compared with itself."""
    needs_compiled_code()
    assert cpu.compiled() is not None


@pytest.fixture
def torch_alone(monkeypatch):
    """Calls a function without compiled code."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "compiled", lambda: None)
            return function(*arguments)

    return run


def test_wrong_code_is_not_used_and_said_so(monkeypatch, caplog):
    monkeypatch.setattr(Library, "function", lambda self, name, arguments: lambda *given: None)
    assert cpu.compiled.__wrapped__() is None
    assert [record.getMessage() for record in caplog.records] == [
        "compiled code for sampling differs from its reference, torch computes instead"
    ]


def case(width, seed=7):
    """Logits of which some are masked, keys and codes."""
    logits = make_logits(ROWS, width, 3.0, seed=seed)
    logits[::3] = logits[::3].masked_fill(make_logits(24, width, 1.0, seed=seed + 1) > 0.3, -torch.inf)
    logits[:, width // 2] = logits[:, width // 2].clamp(min=-9.0)  # something is left
    return logits, position_keys(torch.arange(ROWS), torch.arange(ROWS)), token_codes(width, CPU)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_same_tokens_are_drawn(torch_alone, width):
    logits, keys, codes = case(width)
    assert draw(logits, keys, codes).tolist() == torch_alone(draw, logits, keys, codes).tolist()
    assert draw(logits.mul(1e-3), keys, codes).tolist() == torch_alone(draw, logits.mul(1e-3), keys, codes).tolist()


def chosen_by_torch(logits, columns, slots, positions, codes, guided=None, bits=None):
    """The computation of `Functions.choose`, step by step."""
    masked = logits.clone()
    if guided is not None:
        keep_bits(masked, guided, bits)
    streams, scales, floors = (
        torch.from_numpy(column[slots]) for column in (columns.streams, columns.scales, columns.floors)
    )
    scores = (masked - masked.amax(-1, keepdim=True)) * scales[:, None]
    scores = scores.masked_fill(scores < floors[:, None], -torch.inf)
    drawn = draw(scores, position_keys(streams, torch.from_numpy(positions)), codes)
    tokens = torch.where(scales == 0, masked.argmax(-1), drawn)
    usable = masked.amax(-1).isfinite() & logits.amax(-1).isfinite()
    return torch.where(usable, tokens, -1), logits.amax(-1)


def columns_of(rows, *, min_p=False):
    random = np.random.default_rng(3)
    floors = -30.0 * random.random(rows) if min_p else np.full(rows, -np.inf)
    scales = np.where(random.random(rows) < 0.3, 0.0, np.linspace(0.01, 40.0, rows))
    return Columns(random.integers(-(2**63), 2**63, rows), scales.astype(np.float32), floors.astype(np.float32))


@pytest.mark.parametrize("guided", [None, range(0, ROWS, 2), range(ROWS), [69]])
@pytest.mark.parametrize("min_p", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_same_tokens_are_chosen(torch_alone, width, min_p, guided):
    logits, _, codes = case(width)
    logits[5], logits[6, 0], logits[7, width - 1] = -torch.inf, torch.nan, torch.inf
    random = np.random.default_rng(width)
    slots, positions = random.integers(0, 200, ROWS), random.integers(0, 2**40, ROWS)
    masks: tuple = ()
    if guided is not None:
        bits = torch.from_numpy(random.integers(-(2**31), 2**31, (len(guided), -(-width // 32) + 1), dtype=np.int32))
        bits[0] = 0
        masks = (torch.tensor(list(guided)), bits)
    before = logits.clone()
    found = cpu.compiled().choose(logits, columns_of(200, min_p=min_p), slots, positions, codes, *masks)
    right = torch_alone(chosen_by_torch, logits, columns_of(200, min_p=min_p), slots, positions, codes, *masks)
    assert found[0].tolist() == right[0].tolist()
    assert torch.equal(found[1].nan_to_num(nan=7.0), right[1].nan_to_num(nan=7.0))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert set(found[0][5:8].tolist()) == {-1}


def test_the_number_of_threads_does_not_matter():
    logits, keys, codes = case(5000)
    before = torch.get_num_threads()
    drawn = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            drawn.append(draw(logits, keys, codes).tolist())
    finally:
        torch.set_num_threads(before)
    assert drawn[0] == drawn[1]


def test_rows_may_lie_apart(torch_alone):
    logits, keys, codes = case(100)
    apart = make_logits(2 * ROWS, 130, 1.0, seed=9)[::2, :100].copy_(logits)
    assert not apart.is_contiguous()
    assert draw(apart, keys, codes).tolist() == torch_alone(draw, logits, keys, codes).tolist()


def test_what_cannot_be_drawn_from_gives_some_token():
    logits, keys, codes = case(77)
    logits[0], logits[1], logits[2, 5], logits[3, 5] = -torch.inf, torch.nan, torch.nan, torch.inf
    sound = draw(logits[4:], keys[4:], codes).tolist()
    drawn = draw(logits, keys, codes).tolist()
    assert all(0 <= token < 77 for token in drawn)
    assert drawn[3:] == [5, *sound]


@pytest.mark.parametrize("width", [*WIDTHS, 32, 64])
def test_the_same_tokens_are_masked(torch_alone, width):
    words = -(-width // 32) + 1  # masks may speak of more than there is
    bits = torch.randint(-(2**31), 2**31, (9, words), generator=torch.Generator().manual_seed(width)).int()
    bits[0], bits[1] = -1, 0
    rows = torch.tensor([0, 3, 4, 5, 20, 21, 50, 68, 69])
    logits = make_logits(ROWS, width, 3.0, seed=9)
    got, right = logits.clone(), logits.clone()
    keep_bits(got, rows, bits)
    torch_alone(keep_bits, right, rows, bits)
    assert torch.equal(got, right)
    assert torch.equal(got[0], logits[0])
    assert bool(got[3].isinf().all())
    others = torch.ones(ROWS, dtype=torch.bool).index_fill_(0, rows, False)
    assert torch.equal(got[others], logits[others])
