"""Masks, penalties and log-probabilities on a GPU, in one pass over the logits each and without the host."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.sampling.triton_noise import accurate_log

ADJUST = Launch(warps=4, stages=1, constants={"BLOCK": 1024})
TALLY = Launch(warps=4, stages=1, constants={"BLOCK": 512})
LOGPROBS = Launch(warps=8, stages=2, constants={"BLOCK": 2048})


@triton.jit
def bit_of(words, ids, there):
    """True if the bit of a token is set, in packed int32 words."""
    return ((tl.load(words + ids // 32, there, 0) >> (ids % 32)) & 1) != 0


@triton.jit(do_not_specialize=["rows", "bits"])
def keep_bits_kernel(logits, rows, bits, width, row_stride, words, BLOCK: tl.constexpr):
    """Mask BLOCK tokens of one row where their bit is not set."""
    index, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = ids < width
    row = logits + tl.load(rows + index).to(tl.int64) * row_stride
    forbidden = bit_of(bits + index * words, ids, there) == 0
    tl.store(row + ids, tl.full([BLOCK], float("-inf"), tl.float32), there & forbidden)


@triton.jit(do_not_specialize=["rows", "repetition", "frequency", "presence"])
def penalize_kernel(
    logits, rows, counts, seen, repetition, frequency, presence, width, row_stride, words, BLOCK: tl.constexpr
):
    """Penalties of BLOCK tokens of one row, to the bit as torch has them: rows change between its path and this one."""
    index, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = ids < width
    place = logits + tl.load(rows + index).to(tl.int64) * row_stride + ids
    x = tl.load(place, there, 0.0)
    count = tl.load(counts + index * width + ids, there, 0)
    factor = tl.load(repetition + index)
    repeated = tl.where(x > 0, tl.div_rn(x, factor + tl.zeros_like(x)), x * factor)
    repeated = tl.where(repeated > 3.4028234663852886e38, 3.4028234663852886e38, repeated)
    x = tl.where((count > 0) | bit_of(seen + index * words, ids, there), repeated, x)
    lowered = x - tl.load(frequency + index) * count.to(tl.float32) - tl.load(presence + index)
    tl.store(place, tl.where(count > 0, lowered, x), there)


@triton.jit(do_not_specialize=["slots", "skips", "prompts", "ends"])
def tally_kernel(texts, slots, skips, prompts, ends, counts, seen, length, vocab, words, BLOCK: tl.constexpr):
    """BLOCK tokens of one row, added to the counts of others."""
    index, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (place >= tl.load(skips + index)) & (place < tl.load(ends + index))
    prompt = place < tl.load(prompts + index)
    token = tl.load(texts + tl.load(slots + index) * length + place, there, 0)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    one = tl.full([BLOCK], 1, tl.int32)
    tl.atomic_add(counts + index * vocab + token, one, mask=there & (prompt == 0), sem="relaxed")
    tl.atomic_or(seen + index * words + token // 32, one << (token % 32), mask=there & prompt, sem="relaxed")


@triton.jit
def logprobs_kernel(logits, chosen, out, ranks, width, row_stride, BLOCK: tl.constexpr):
    """Log-probability and rank of one row's token; the sum of exponentials follows the largest logit so far."""
    index, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row = logits + index * row_stride
    own = tl.load(row + tl.load(chosen + index)).to(tl.float32)
    peaks, sums = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    above, bad = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for begin in range(0, width, BLOCK):
        x = tl.load(row + begin + lanes, begin + lanes < width, float("-inf")).to(tl.float32)
        bad += (x != x).to(tl.int32)
        above += (x > own).to(tl.int32)
        peak = tl.maximum(peaks, x)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        sums = sums * tl.exp(peaks - base) + tl.exp(x - base)
        peaks = peak
    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(sums * tl.exp(peaks - base), 0)
    logprob = own - base - accurate_log(total)
    tl.store(out + index, tl.where(tl.sum(bad, 0) > 0, float("nan"), logprob))
    tl.store(ranks + index, tl.sum(above, 0) + 1)


def keep_bits_triton(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """As `adjust.keep_bits`."""
    if rows.numel():
        grid = (rows.shape[0], triton.cdiv(logits.shape[1], ADJUST.constants["BLOCK"]))
        keep_bits_kernel[grid](logits, rows, bits, logits.shape[1], logits.stride(0), bits.shape[1], **ADJUST.options)


def penalize_triton(
    logits: Tensor, rows: Tensor, counts: Tensor, seen: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """As `adjust.penalize`."""
    if rows.numel():
        grid = (rows.shape[0], triton.cdiv(logits.shape[1], ADJUST.constants["BLOCK"]))
        penalize_kernel[grid](
            logits,
            rows,
            counts,
            seen,
            repetition,
            frequency,
            presence,
            logits.shape[1],
            logits.stride(0),
            seen.shape[1],
            enable_fp_fusion=False,
            **ADJUST.options,
        )


def tally_triton(
    texts: Tensor, slots: Tensor, skips: Tensor, prompts: Tensor, ends: Tensor, *, vocab: int, longest: int
) -> tuple[Tensor, Tensor]:
    """As `adjust.tally`; the texts' rows lie as far apart as they are long."""
    rows, words = slots.shape[0], triton.cdiv(vocab, 32)
    counts = torch.zeros(rows, vocab, dtype=torch.int32, device=texts.device)
    seen = torch.zeros(rows, words, dtype=torch.int32, device=texts.device)
    if rows and longest:
        tally_kernel[(rows, triton.cdiv(longest, TALLY.constants["BLOCK"]))](
            texts, slots, skips, prompts, ends, counts, seen, texts.stride(0), vocab, words, **TALLY.options
        )
    return counts, seen


def chosen_logprobs_triton(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """As `logprobs.chosen_logprobs`."""
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        logprobs_kernel[(rows,)](logits, chosen, out, ranks, width, logits.stride(0), **LOGPROBS.options)
    return out, ranks
