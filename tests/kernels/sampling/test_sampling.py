"""Noise, search and drawing: against the reference and against the statistics that they promise."""

import math

import pytest
import torch

from troupellm.kernels.sampling import WIDEST_PREFIX, draw, draw_truncated, reference
from troupellm.kernels.sampling.cases import make_logits
from troupellm.kernels.sampling.logprobs import FLOOR, token_logprobs
from troupellm.kernels.sampling.noise import log_exponential, position_keys, stream_key, token_codes
from troupellm.kernels.sampling.search import row_argmax, top_values
from troupellm.kernels.sampling.truncate import Nucleus, draw_from_prefix

CPU = torch.device("cpu")


def keys_of(seeds=(0,), forks=(0,), positions=(0,), purposes=(0,)):
    points = [(s, f, p, u) for s in seeds for f in forks for p in positions for u in purposes]
    streams = torch.tensor([stream_key(s, f, u) for s, f, _, u in points])
    return position_keys(streams, torch.tensor([p for _, _, p, _ in points]))


def uniforms(keys, vocab=512):
    return torch.exp(-log_exponential(token_codes(vocab, CPU), keys).double().exp())


def surprise(observed, expected):
    """A chi-square statistic as standard deviations of a normal one (Wilson and Hilferty)."""
    freedom = observed.numel() - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def nucleus(rows, top_k, top_p):
    return Nucleus(torch.full((rows, 1), top_k), torch.full((rows, 1), top_p, dtype=torch.float64))


@pytest.mark.parametrize(
    ("seed", "fork", "purpose", "position"),
    [(0, 0, 0, 0), (1, 0, 0, 5), (2**64 - 1, 63, 1, 131071), (2**63, 1, 0, 2**31), (12345, 2, 0, 7)],
)
def test_noise_is_the_documented_function(seed, fork, purpose, position):
    got = log_exponential(token_codes(100, CPU), keys_of((seed,), (fork,), (position,), (purpose,)))[0]
    want = [reference.log_exponential(seed, fork, purpose, position, token) for token in range(100)]
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", ["seeds", "forks", "positions", "purposes"])
def test_noise_is_uniform_and_independent_along(axis):
    drawn = uniforms(keys_of(**{axis: range(512)}))
    bins = torch.bincount((drawn * 256).long().flatten(), minlength=256).double()
    assert abs(surprise(bins, drawn.numel() / 256)) < 4
    for here, there in ((drawn[:-1], drawn[1:]), (drawn[:-2], drawn[2:]), (drawn[:, :-1], drawn[:, 1:])):
        pairs = (here * 16).long() * 16 + (there * 16).long()
        counts = torch.bincount(pairs.flatten(), minlength=256).double()
        assert abs(surprise(counts, pairs.numel() / 256)) < 4
    correlation = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert float(correlation.abs().max()) < 6 / math.sqrt(drawn.shape[1])


def test_every_row_has_equally_spread_noise():
    drawn = uniforms(keys_of(positions=range(300)), vocab=4096)
    worst = max(abs(surprise(torch.histc(row.float(), 64, 0, 1).double(), 64.0)) for row in drawn)
    assert worst < 5


def test_small_exponentials_have_fine_resolution():
    """A flat distribution over a large vocabulary is decided among the smallest values, which must not tie."""
    noise = log_exponential(token_codes(150_000, CPU), keys_of(positions=range(8)))
    smallest = noise.sort(-1).values[:, :200]
    assert bool((smallest[:, 1:] > smallest[:, :-1]).all())


def test_no_two_draws_share_their_keys():
    keys = keys_of(range(40), range(10), range(100), range(2)).view(torch.int64)
    assert keys.unique().numel() == keys.numel()


def test_fork_seed_and_position_do_not_stand_in_for_each_other():
    points = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)]
    rows = torch.cat([keys_of((s,), (f,), (p,), (u,)) for s, f, p, u in points]).tolist()
    assert len({tuple(row) for row in rows}) == len(points)


@pytest.mark.parametrize("width", [1, 7, 255, 512, 1000, 5003])
def test_row_argmax_takes_the_first_largest(width):
    values = make_logits(9, width, 1.0, seed=width)
    values[1] = 0.0
    values[2, width // 2 :] = 9.0
    values[3, -1] = 9.0
    values[4] = -torch.inf
    assert row_argmax(values).tolist() == values.argmax(-1).tolist()


@pytest.mark.parametrize("width", [5, 130, 512, 1000, 5003])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_top_values_are_the_largest_in_falling_order(width, count):
    count = min(count, width)
    values = make_logits(7, width, 1.0, seed=count)
    values[1] = values[1].round()
    values[2] = -torch.inf
    values[3, -1] = 50.0
    found, ids = top_values(values, count)
    assert torch.equal(found, values.sort(-1, descending=True).values[:, :count])
    assert torch.equal(values.gather(1, ids), found)
    assert all(len(set(row)) == count for row in ids.tolist())


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_drawn_frequencies_follow_the_distribution(spread):
    logits = make_logits(1, 40, spread, seed=1)
    draws = 20_000
    keys = keys_of(positions=range(draws))
    tokens = draw(logits.expand(draws, -1), keys, token_codes(40, CPU))
    expected = logits[0].double().softmax(-1) * draws
    counts = torch.bincount(tokens, minlength=40).double()
    common = expected >= 5
    counts = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None] + 1e-9))
    assert abs(surprise(counts[expected > 1], expected[expected > 1])) < 4


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(600, 0.9), (20, 0.9), (20, 1.0), (600, 1e-9), (1, 1.0), (600, 0.999999)])
def test_prefix_and_sort_draw_the_same_tokens(spread, top_k, top_p):
    logits = make_logits(50, 600, spread, seed=2)
    scaled = logits - logits.amax(-1, keepdim=True)
    keys, codes, kept = keys_of(positions=range(50)), token_codes(600, CPU), nucleus(50, top_k, top_p)
    by_sort = draw_truncated(scaled, kept, keys, codes, 0)
    assert draw_truncated(scaled, kept, keys, codes, 64).tolist() == by_sort.tolist()
    assert draw_truncated(scaled, kept, keys, codes, 600).tolist() == by_sort.tolist()


@pytest.mark.parametrize(("spread", "top_k", "top_p"), [(2.5, 9000, 0.8), (0.2, 9000, 0.9), (1.0, 500, 0.9)])
def test_rows_that_a_short_prefix_does_not_decide(spread, top_k, top_p):
    """The first is decided by the wider prefix, the second by a sort, the third is where top_k alone says so."""
    logits = make_logits(12, 9000, spread, seed=17)
    scaled = logits - logits.amax(-1, keepdim=True)
    keys, codes, kept = keys_of(positions=range(12)), token_codes(9000, CPU), nucleus(12, top_k, top_p)
    by_sort = draw_truncated(scaled, kept, keys, codes, 0).tolist()
    assert not bool(draw_from_prefix(scaled, kept, keys, codes, 64)[1].any())
    assert bool(draw_from_prefix(scaled, kept, keys, codes, WIDEST_PREFIX)[1].all()) == (spread > 0.5)
    assert draw_truncated(scaled, kept, keys, codes, 64).tolist() == by_sort


def test_equal_logits_at_the_edge_are_kept_together():
    scaled = torch.zeros(4000, 300)
    scaled[:, 200:] = -20.0
    tokens = draw_truncated(scaled, nucleus(4000, 3, 1.0), keys_of(positions=range(4000)), token_codes(300, CPU), 64)
    assert set(tokens.tolist()) == set(range(200))


@pytest.mark.parametrize("prefix", [0, 8, 64])
def test_equal_logits_at_the_edge_of_a_share_are_kept_together(prefix):
    """Of the three likeliest two make up the share, and nothing tells the second from the third."""
    scaled = torch.full((500, 300), -20.0)
    scaled[:, 5], scaled[:, 70], scaled[:, 280] = 0.0, -0.5, -0.5
    keys, codes = keys_of(positions=range(500)), token_codes(300, CPU)
    tokens = draw_truncated(scaled, nucleus(500, 300, 0.6), keys, codes, prefix)
    assert set(tokens.tolist()) == {5, 70, 280}


def test_fewer_tokens_than_top_k():
    scaled = torch.full((50, 300), -torch.inf)
    scaled[:, 7] = 0.0
    scaled[:, 290] = -0.5
    tokens = draw_truncated(scaled, nucleus(50, 40, 1.0), keys_of(positions=range(50)), token_codes(300, CPU), 64)
    assert set(tokens.tolist()) == {7, 290}


def test_a_row_is_drawn_alike_in_any_batch():
    """Wide enough that a batch is drawn in several pieces."""
    vocab, rows = 30_011, 80
    logits = make_logits(rows, vocab, 2.0, seed=3)
    keys, codes = keys_of(positions=range(rows)), token_codes(vocab, CPU)
    together = draw(logits, keys, codes).tolist()
    assert [int(draw(logits[i : i + 1], keys[i : i + 1], codes)) for i in range(0, rows, 9)] == together[::9]
    assert draw(logits[3:50], keys[3:50], codes).tolist() == together[3:50]


def test_tiny_differences_of_logits_do_not_change_tokens():
    """The effect of another batch size on logits must not show: an inverse CDF over many tokens would fail this."""
    logits = make_logits(2000, 2000, 2.0, seed=4)
    keys, codes = keys_of(positions=range(2000)), token_codes(2000, CPU)
    moved = logits + 1e-6 * torch.sign(make_logits(2000, 2000, 1.0, seed=5))
    assert int((draw(logits, keys, codes) != draw(moved, keys, codes)).sum()) <= 1


def test_logprobs_are_those_of_the_softmax_with_ranks():
    logits = make_logits(6, 500, 2.0, seed=6)
    chosen = torch.tensor([0, 1, 2, 3, 4, int(logits[5].argmax())])
    ids, values, ranks = token_logprobs(logits.log_softmax(-1), chosen, 4)
    full = logits.double().log_softmax(-1)
    assert (ids.dtype, values.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert torch.equal(ids[:, 0].long(), chosen)
    torch.testing.assert_close(values.double(), full.gather(1, ids.long()), rtol=0, atol=1e-5)
    assert torch.equal(ids[:, 1:].long(), full.topk(4, -1).indices)
    assert ranks.tolist() == [1 + int((full[i] > full[i, token]).sum()) for i, token in enumerate(chosen.tolist())]
    assert int(ranks[5]) == 1


def test_logprobs_are_floored_and_never_nan():
    logits = torch.full((3, 40), -torch.inf)
    logits[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    logits[1] = torch.nan
    logits = logits.log_softmax(-1)
    ids, values, _ = token_logprobs(logits, torch.tensor([20, 0, 0]), 5)
    assert float(values[0, 0]) == FLOOR
    assert values[0, 4:].tolist() == [FLOOR, FLOOR]
    assert bool(values.isfinite().all())
    assert ids.shape == (3, 6)
    assert token_logprobs(logits, torch.tensor([0, 0, 0]), 1000)[0].shape == (3, 41)
    assert token_logprobs(logits, torch.tensor([0, 0, 0]), 0)[1].shape == (3, 1)
