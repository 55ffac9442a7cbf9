"""Draws from what top_k and top_p leave against a sort, over rows that lie in NaN and memory that holds anything."""

from typing import NamedTuple

import pytest
import torch

from troupellm.kernels.common.triton import check_device
from troupellm.kernels.sampling import draw, thresholds, triton_truncate
from troupellm.kernels.sampling.cases import make_logits
from troupellm.kernels.sampling.noise import token_codes
from troupellm.kernels.sampling.triton_truncate import truncated_triton
from troupellm.kernels.sampling.truncate import Nucleus
from troupellm.tests.support.kernels.poisoned_rows import between_nan, keys_of, poisoned_memory

__all__ = ["poisoned_memory"]
DEVICE, CPU = check_device(), torch.device("cpu")
VOCAB, WIDE = 3001, 13_001
INF = float("inf")


class Asked(NamedTuple):
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


def check(logits: torch.Tensor, asked: list[Asked]) -> torch.Tensor:
    """Tokens and kept sets are those of a sort on the host; the tokens."""
    rows, vocab = logits.shape
    codes, keys = token_codes(vocab, CPU), keys_of(rows)
    scales = torch.tensor([(1 / each.temperature, each.min_p) for each in asked], dtype=torch.float32)
    scales[:, 1].log_()
    k = torch.tensor([each.top_k or vocab for each in asked])
    p = torch.tensor([each.top_p for each in asked], dtype=torch.float64)
    there = [part.to(DEVICE) for part in (k, p, codes, keys, scales)]
    tokens, cuts = truncated_triton(between_nan(logits.to(DEVICE)), *there[:3], keys=there[3], scales=there[4])
    x = (logits - logits.amax(1, keepdim=True)) * scales[:, :1]
    x.masked_fill_(x < scales[:, 1:], -INF)
    kept = (x >= thresholds(x, Nucleus(k[:, None], p[:, None]))) & (x > -INF)
    assert torch.equal((x >= cuts.cpu()[:, None]) & (x > -INF), kept)
    assert torch.equal(tokens.cpu(), draw(x.masked_fill(~kept, -INF), keys, codes))
    alone = truncated_triton(between_nan(x.to(DEVICE)), *there[:2])
    assert torch.equal(alone[1], cuts)
    return tokens.cpu()


OPTIONS = {
    "top_k": Asked(5),
    "top_k and top_p": Asked(50, 0.9),
    "few and top_p": Asked(7, 0.8),
    "top_p": Asked(0, 0.9),
    "tiny top_p": Asked(0, 1e-6),
    "wide": Asked(2000, 0.99),
    "all": Asked(),
    "nearly all": Asked(VOCAB - 1, 1.0),
    "one": Asked(1, 0.5),
    "min_p": Asked(0, 1.0, 0.05),
    "all three": Asked(40, 0.8, 0.01),
    "hot": Asked(0, 0.95, 0.0, 50.0),
    "cold": Asked(0, 0.95, 0.0, 0.01),
    "cold and few": Asked(6, 0.9, 0.0, 0.003),
    "hot and few": Asked(4, 0.5, 0.1, 3.0),
}
QUICK = ("all three",)


@pytest.mark.parametrize("spread", [3.0, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OPTIONS]
)
def test_keeps_and_draws_the_same(name: str, spread: float) -> None:
    logits = make_logits(4, VOCAB, spread, 3)
    logits[1] = (logits[1] * 4).round() / 4  # many equal ones
    logits[2, 100:] = -INF
    logits[3] = -INF
    logits[3, 2999] = 1.0
    assert check(logits, [OPTIONS[name]] * 4)[3] == 2999


@pytest.mark.slow
def test_rows_of_a_batch_ask_for_what_they_like() -> None:
    """Over pieces, the last of which is a part: what a row is given is what it is given alone."""
    asked = [*OPTIONS.values()][::2]
    logits = make_logits(len(asked), WIDE, 2.0, 4)
    logits[:, -1] = logits.amax(1)
    tokens = check(logits, asked)
    assert tokens[:1].equal(check(logits[:1], asked[:1]))


@pytest.mark.parametrize("vocab", [1, 5, *(pytest.param(vocab, marks=pytest.mark.slow) for vocab in (4096, 140_001))])
def test_truncation_of_each_width_equals_the_reference(vocab: int) -> None:
    logits = make_logits(4, vocab, 3.0, 5)
    check(logits, [Asked(20, 0.95), Asked(0, 0.9), Asked(3), Asked(1000, 0.7)])


def test_lists_that_run_over_are_gone_through_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_truncate, "LISTED", 16)
    logits = make_logits(5, 1300, 0.01, 6)
    logits[1] = 2.0
    logits[2] = logits[2].sign()
    check(logits, [Asked(7, 0.9), Asked(0, 0.9), Asked(0, 0.6), Asked(300, 0.8), Asked(9)])


def test_truncation_lists_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which makes it quick, at any temperature and with any masks."""

    class Watched:
        def __getitem__(self, grid: object) -> object:
            return lambda *given, **sizes: arguments.update(zip(names, given, strict=False))

    names, arguments = triton_truncate.settle_kernel.arg_names, dict[str, torch.Tensor]()
    monkeypatch.setattr(triton_truncate, "settle_kernel", Watched())
    rows = 6
    logits = make_logits(rows, WIDE, 3.0, 10).to(DEVICE)
    logits[5, ::2] = -1e9
    scales = torch.tensor([1.0, 100.0, 0.01, 1.0, 0.01, 1.0])[:, None] * torch.tensor([[1.0, -INF]])
    k = torch.tensor([20, 20, 20, WIDE, WIDE, 20]).to(DEVICE)
    p = torch.full((rows,), 0.9, dtype=torch.float64).to(DEVICE)
    truncated_triton(logits, k, p, scales=scales.to(DEVICE))
    assert max(arguments["listed"].tolist()) < 100
    assert min(arguments["listed"][[0, 1, 2, 5]].tolist()) >= 20


@pytest.mark.filterwarnings("ignore:overflow")
def test_masks_of_large_numbers_do_not_spoil_the_bins() -> None:
    logits = make_logits(3, VOCAB, 2.0, 7)
    logits[:, ::3] = -1e9
    logits[1, 1::3] = -3.4e38
    logits[2, 1:] = -3e38  # fewer others than are asked for
    logits[2, 0] = 3e38
    check(logits, [Asked(900, 0.99), Asked(0, 0.999), Asked(100, 0.9999)])


def test_rows_that_are_unfit_fail_alone() -> None:
    logits = make_logits(5, VOCAB, 3.0, 8)
    logits[0, 2000], logits[1, 5], logits[2] = float("nan"), INF, -INF
    logits[3, 2000] = -INF
    k, p = torch.tensor([3, VOCAB, 600, VOCAB, 4]), torch.tensor([1.0, 0.9, 0.8, 0.9, 0.7], dtype=torch.float64)
    codes, keys = token_codes(VOCAB, CPU), keys_of(5)
    given = [part.to(DEVICE) for part in (k, p, codes)]
    tokens, _ = truncated_triton(between_nan(logits.to(DEVICE)), *given, keys=keys.to(DEVICE))
    assert tokens[:3].tolist() == [-1, -1, -1]
    whole, _ = truncated_triton(
        logits[3:].to(DEVICE), *(part[3:] for part in given[:2]), given[2], keys=keys[3:].to(DEVICE)
    )
    assert tokens[3:].equal(whole)


def test_thresholds_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masses are summed in whole numbers: rows cut otherwise give the same thresholds to the bit."""
    logits = make_logits(3, VOCAB, 1.5, 9).to(DEVICE)
    k = torch.tensor([4, VOCAB, 200]).to(DEVICE)
    p = torch.tensor([0.9, 0.9, 0.8], dtype=torch.float64).to(DEVICE)
    codes, keys = token_codes(VOCAB, CPU).to(DEVICE), keys_of(3).to(DEVICE)
    expected = truncated_triton(logits, k, p, codes, keys=keys)
    for block, busy, few in ((512, 1024, 256), (1024, 2, 16), (512, 3, 16)):
        monkeypatch.setitem(triton_truncate.PIECE, "BLOCK", block)
        monkeypatch.setitem(triton_truncate.SETTLE.constants, "FEW", few)
        monkeypatch.setattr(triton_truncate, "BUSY", busy)
        got = truncated_triton(logits, k, p, codes, keys=keys)
        assert all(map(torch.equal, got, expected))
