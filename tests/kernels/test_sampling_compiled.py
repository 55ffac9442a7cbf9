"""Sampling by compiled code is sampling by torch."""

import pytest
import torch

from troupellm.kernels.sampling import draw, draw_tempered, native
from troupellm.kernels.sampling.adjust import keep_bits
from troupellm.kernels.sampling.cases import make_logits
from troupellm.kernels.sampling.noise import position_keys, token_codes

CPU = torch.device("cpu")
WIDTHS = [1, 2, 15, 16, 17, 33, 2048, 30_011]
ROWS = 70


@pytest.fixture(autouse=True)
def _compiled():
    if native.compiled() is None:
        pytest.skip("there is no compiled code here")


@pytest.fixture
def torch_alone(monkeypatch):
    """Calls a function without compiled code."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(native, "compiled", lambda: None)
            return function(*arguments)

    return run


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


@pytest.mark.parametrize("min_p", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_same_tokens_are_drawn_at_any_temperature(torch_alone, width, min_p):
    logits, keys, codes = case(width)
    peaks, heat = logits.amax(-1), torch.linspace(0.01, 40.0, ROWS)[:, None]
    floors = torch.linspace(-30.0, 0.0, ROWS)[:, None] if min_p else None
    got = draw_tempered(logits.clone(), peaks, heat, floors, keys, codes)
    assert got.tolist() == torch_alone(draw_tempered, logits.clone(), peaks, heat, floors, keys, codes).tolist()


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
