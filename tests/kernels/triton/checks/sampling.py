"""Drawing without a sort against the reference, over rows that lie in NaN."""

import pytest
import torch

from troupellm.kernels.common.triton import check_device
from troupellm.kernels.sampling import draw
from troupellm.kernels.sampling.adjust import keep_bits, penalize, tally
from troupellm.kernels.sampling.cases import make_logits
from troupellm.kernels.sampling.logprobs import chosen_logprobs
from troupellm.kernels.sampling.noise import log_exponential, token_codes
from troupellm.kernels.sampling.triton_adjust import (
    chosen_logprobs_triton,
    keep_bits_triton,
    penalize_triton,
    tally_triton,
)
from troupellm.kernels.sampling.triton_draw import best_triton
from troupellm.tests.support.kernels.poisoned_rows import between_nan, keys_of

DEVICE = check_device()
VOCAB = 3001


def test_noise_is_the_same() -> None:
    """Read off one by one: of logits of which only one is finite, the best score is that less its noise."""
    keys, codes = keys_of(24), token_codes(24, torch.device("cpu"))
    logits = torch.full((24, 24), float("-inf")).fill_diagonal_(0.0).to(DEVICE)
    tokens, scores = best_triton(logits, keys.to(DEVICE), codes.to(DEVICE))
    assert tokens.tolist() == list(range(24))
    torch.testing.assert_close(scores.cpu(), -log_exponential(codes, keys).diagonal(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("vocab", [VOCAB, pytest.param(40_000, marks=pytest.mark.slow)])
def test_draws_the_same_tokens(vocab: int) -> None:
    logits, keys, codes = make_logits(6, vocab, 3.0, 1), keys_of(6), token_codes(vocab, torch.device("cpu"))
    tokens, _ = best_triton(between_nan(logits.to(DEVICE)), keys.to(DEVICE), codes.to(DEVICE))
    assert torch.equal(tokens.cpu(), draw(logits, keys, codes))


def test_argmax_takes_the_first_and_shows_nan() -> None:
    logits = make_logits(4, 20_000, 1.0, 2)
    logits[0, [17, 9000, 19_999]] = 50.0
    logits[1] = float("-inf")
    logits[2, 12_345] = float("nan")
    tokens, values = best_triton(between_nan(logits.to(DEVICE)))
    assert tokens[0] == 17
    assert tokens[3] == logits[3].argmax()
    assert 0 <= int(tokens[1]) < 20_000
    assert values.isnan().tolist() == [False, False, True, False]
    assert values[0] == 50.0


def packed(generator: torch.Generator, rows: int, width: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, -(-width // 32)), generator=generator).to(torch.int32)


def test_a_mask_of_bits() -> None:
    generator, logits, rows = torch.Generator().manual_seed(4), make_logits(4, 1500, 1.0, 5), torch.tensor([1, 3])
    bits, got = packed(generator, 2, 1500), between_nan(logits.to(DEVICE))
    keep_bits_triton(got, rows.to(DEVICE), bits.to(DEVICE))
    keep_bits(logits, rows, bits)
    assert torch.equal(got.cpu(), logits)
    assert 0.4 < float(logits[1].isinf().float().mean()) < 0.6
    assert not logits[0].isinf().any()


@pytest.mark.parametrize("vocab", [70, 64])
def test_what_is_said_is_counted(vocab: int) -> None:
    generator = torch.Generator().manual_seed(8)
    texts = torch.randint(-2, vocab + 2, (5, 700), generator=generator, dtype=torch.int32)
    texts[1, :] = 3  # one token again and again
    slots, skips, prompts, ends = (
        torch.tensor(part) for part in ([4, 1, 0, 2], [0, 0, 30, 0], [10, 0, 30, 600], [11, 690, 31, 600])
    )
    expected = tally(texts, slots, skips, prompts, ends, vocab=vocab, longest=690)
    given = (part.to(DEVICE) for part in (texts, slots, skips, prompts, ends))
    got = tally_triton(*given, vocab=vocab, longest=690)
    for mine, wanted in zip(got, expected, strict=True):
        assert mine.dtype == torch.int32
        assert torch.equal(mine.cpu(), wanted)
    assert expected[0].sum(1).tolist() == [1, 690, 1, 0]


@pytest.mark.filterwarnings("ignore:overflow")
def test_penalties_equal_the_reference() -> None:
    generator, logits, rows = torch.Generator().manual_seed(5), make_logits(4, 1500, 1.0, 6), torch.tensor([0, 3])
    logits[3, 5:20] = 3e38
    counts = torch.randint(-3, 4, (2, 1500), generator=generator).clamp(min=0).to(torch.int32)
    seen, got = packed(generator, 2, 1500), between_nan(logits.to(DEVICE))
    options = torch.tensor([[1.3, 0.4], [0.7, -0.5], [1.5, 0.0]])
    penalize_triton(got, *(part.to(DEVICE) for part in (rows, counts, seen, *options)))
    penalize(logits, rows, counts, seen, *options)
    assert torch.equal(got.cpu(), logits)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # Triton 3.6's interpreter
@pytest.mark.parametrize("vocab", [2500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_log_probabilities_equal_the_reference(vocab: int) -> None:
    logits, chosen = make_logits(5, vocab, 4.0, 7), torch.tensor([0, 7, 1, vocab - 1, 9])
    logits[1, :2100] = float("-inf")
    logits[1, 7] = 2.0
    logits[2] = float("nan")
    got, ranks = chosen_logprobs_triton(between_nan(logits.to(DEVICE)), chosen.to(DEVICE))
    expected, expected_ranks = chosen_logprobs(logits, chosen)
    torch.testing.assert_close(got.cpu(), expected, atol=2e-6, rtol=2e-6, equal_nan=True)
    assert torch.equal(ranks.cpu(), expected_ranks)
