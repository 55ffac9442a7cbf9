"""Cases of drawing, of what goes before it and of what is told behind it, against definitions on the host."""

from collections.abc import Iterator

import torch

from troupellm.kernels.sampling import draw, draw_truncated
from troupellm.kernels.sampling.adjust import penalize, tally
from troupellm.kernels.sampling.cases import make_logits
from troupellm.kernels.sampling.logprobs import chosen_logprobs
from troupellm.kernels.sampling.noise import position_keys, stream_key, token_codes
from troupellm.kernels.sampling.truncate import Nucleus, thresholds
from troupellm.load_tests.kernels.outcome import Outcome


def draws(device: str) -> Iterator[Outcome]:
    """Every device draws the same tokens, which are those of the noise as it is defined."""
    from troupellm.kernels.sampling.reference import log_exponential

    for rows in (1, 3):
        logits = make_logits(rows, 64, 3.0, 1)
        keys = position_keys(torch.full((rows,), stream_key(7, 0)), torch.arange(rows))
        noise = [[log_exponential(7, 0, 0, row, token) for token in range(64)] for row in range(rows)]
        expected = (logits.double() - torch.tensor(noise, dtype=torch.float64)).argmax(dim=1)
        got = draw(logits.to(device), keys.to(device), token_codes(64, torch.device(device)))
        yield Outcome(f"{rows}_rows", got, expected)


def truncated_draws(device: str) -> Iterator[Outcome]:
    """Draws from what top_k and top_p leave, where a sorted row says what that is."""
    rows, vocab, where = 3, 700, torch.device(device)
    codes = token_codes(vocab, torch.device("cpu"))
    keys = position_keys(torch.full((rows,), stream_key(7, 0)), torch.arange(rows))
    for top_k, top_p in ((5, 1.0), (vocab, 0.9), (300, 0.8), (vocab, 1.0)):
        logits = make_logits(rows, vocab, 3.0, 2)
        scaled = logits - logits.amax(1, keepdim=True)
        nucleus = Nucleus(torch.full((rows, 1), top_k), torch.full((rows, 1), top_p, dtype=torch.float64))
        expected = draw(scaled.masked_fill(scaled < thresholds(scaled, nucleus), -torch.inf), keys, codes)
        there = Nucleus(nucleus.top_k.to(where), nucleus.top_p.to(where))
        got = draw_truncated(scaled.to(where), there, keys.to(where), codes.to(where), 64)
        yield Outcome(f"top_k {top_k}, top_p {top_p}", got, expected)


def penalties(device: str) -> Iterator[Outcome]:
    """Of rows by what they say, token by token."""
    vocab, prompts, ends = 100, [3, 40, 1], [9, 60, 1]
    logits, texts = make_logits(3, vocab, 3.0, 3), torch.arange(180, dtype=torch.int32).view(3, 60) % 17
    expected, factors = logits.double(), torch.tensor([[1.3, 0.4, 2.0], [0.5, -0.3, 0.0], [0.2, 0.0, 1.0]])
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        repetition, frequency, presence = factors[:, row].double().tolist()
        for token in set(texts[row, :end].tolist()):
            count = texts[row, prompt:end].tolist().count(token)
            x = float(expected[row, token])
            x = x / repetition if x > 0 else x * repetition
            expected[row, token] = x - frequency * count - presence * (count > 0)
    index, skips, *told = (torch.tensor(part, device=device) for part in ([0, 1, 2], [0, 0, 0], prompts, ends))
    counts, seen = tally(texts.to(device), index, skips, *told, vocab=vocab, longest=60)
    got = logits.to(device)
    penalize(got, index, counts, seen, *factors.to(device).unbind())
    yield Outcome("three_rows", got, expected, 1e-5)


def descriptions(device: str) -> Iterator[Outcome]:
    logits, chosen = make_logits(4, 3000, 3.0, 4), torch.tensor([0, 7, 2999, 50])
    values, ranks = chosen_logprobs(logits.to(device), chosen.to(device))
    own = logits.gather(1, chosen[:, None])
    yield Outcome("values", values, logits.double().log_softmax(1).gather(1, chosen[:, None]).flatten(), 1e-5)
    yield Outcome("ranks", ranks, (logits > own).sum(1) + 1)
