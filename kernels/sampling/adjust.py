"""Changes to logits before sampling, at listed places, or of whole rows whose options are on the device.

A place is row * vocab + token in the flat view of contiguous logits [rows, vocab], int64.
"""

import torch
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.sampling import cpu


def keep_only(logits: Tensor, rows: Tensor, places: Tensor) -> None:
    """Mask all of `rows` (int64) but the given places, in place."""
    flat = logits.view(-1)
    kept = flat[places]
    logits.index_fill_(0, rows, -torch.inf)
    flat[places] = kept


def add_at(logits: Tensor, places: Tensor, values: Tensor) -> None:
    """Add float32 values, -inf to mask, in place. Adding, unlike writing, gives repeated places a defined result."""
    logits.view(-1).index_add_(0, places, values)


def repeat_penalty(logits: Tensor, places: Tensor, penalties: Tensor) -> None:
    """Divide positive and multiply negative logits by a factor, in place, once however often a place is listed.

    Args:
        places: [n].
        penalties: float32 [n], above 0; the same for equal places.
    """
    flat = logits.view(-1)
    values = flat[places]
    values = torch.where(values > 0, values / penalties, values * penalties)
    flat[places] = values.clamp_(max=torch.finfo(values.dtype).max)


def occurrence_penalty(
    logits: Tensor, places: Tensor, frequency: Tensor, presence: Tensor, counters: Tensor, slots: Tensor
) -> None:
    """Subtract presence + frequency * occurrences, where each listing of a place is one occurrence, in place.

    Args:
        places: [n].
        frequency, presence: float32 [n]; the same for equal places.
        counters: float32 zeros [slots], used up.
        slots: int64 [n], which counter belongs to each place.
    """
    flat = logits.view(-1)
    counters.index_add_(0, slots, torch.ones_like(frequency))
    flat[places] = flat[places] - frequency * counters[slots] - presence


def matches(tails: Tensor, prefixes: Tensor) -> Tensor:
    """bool [words]: whether each text ends in its prefix.

    Args:
        tails: last tokens, int64 [words, n], right-aligned and filled up with -1.
        prefixes: int64 [words, n], right-aligned and filled up with -2, which matches anything.
    """
    return ((tails == prefixes) | (prefixes == -2)).all(1)


def keep_bits(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Mask the tokens of some rows whose bit is not set, in place.

    Args:
        logits: float32 [all rows, vocab].
        rows: int64 [n], without repeats.
        bits: int32 [n, ceil(vocab / 32)], contiguous; token t is bit t % 32 of word t // 32.
    """
    if by_kernels(logits.device) and logits.stride(1) == 1:
        from troupellm.kernels.sampling.triton_adjust import keep_bits_triton

        keep_bits_triton(logits, rows, bits)
    elif logits.device.type == "cpu" and logits.stride(1) == 1 and (functions := cpu.compiled()) is not None:
        functions.keep_bits(logits, rows, bits)
    else:
        kept = logits.index_select(0, rows).masked_fill_(~unpacked(bits, logits.shape[1]), -torch.inf)
        logits.index_copy_(0, rows, kept)


def penalize(
    logits: Tensor, rows: Tensor, counts: Tensor, seen: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """`repeat_penalty` and `occurrence_penalty` of whole rows, in place.

    Args:
        logits: float32 [all rows, vocab].
        rows: int64 [n], rising and without repeats.
        counts: int32 [n, vocab], contiguous, how often a token was generated.
        seen: int32 [n, ceil(vocab / 32)], packed as in `keep_bits`: the prompt's tokens.
        repetition, frequency, presence: float32 [n].
    """
    if by_kernels(logits.device) and logits.stride(1) == 1:
        from troupellm.kernels.sampling.triton_adjust import penalize_triton

        penalize_triton(logits, rows, counts, seen, repetition, frequency, presence)
        return
    x, factor = logits.index_select(0, rows), repetition[:, None]
    repeated = torch.where(x > 0, x / factor, x * factor).clamp_(max=torch.finfo(x.dtype).max)
    x = torch.where((counts > 0) | unpacked(seen, x.shape[1]), repeated, x)
    lowered = x - frequency[:, None] * counts - presence[:, None]
    logits.index_copy_(0, rows, torch.where(counts > 0, lowered, x))


def tally(
    texts: Tensor, slots: Tensor, skips: Tensor, prompts: Tensor, ends: Tensor, *, vocab: int, longest: int
) -> tuple[Tensor, Tensor]:
    """The counts that `penalize` needs of some rows, from the rows' tokens.

    Args:
        texts: int32 [slots, length]; token ids, and anything behind a row's end.
        slots: int64 [n], the slot of each row's text.
        skips: int64 [n], the number of its first tokens that are not counted.
        prompts: int64 [n], the number of its first tokens that are its prompt.
        ends: int64 [n], its number of tokens.
        longest: no row has more; at most `length`.

    Returns:
        counts int32 [n, vocab], how often each token was generated; seen int32 [n, ceil(vocab / 32)], packed as in
        `keep_bits`: the prompt's tokens.
    """
    if by_kernels(texts.device):
        from troupellm.kernels.sampling.triton_adjust import tally_triton

        return tally_triton(texts, slots, skips, prompts, ends, vocab=vocab, longest=longest)
    words = -(-vocab // 32)
    said = texts[:, :longest].index_select(0, slots).long().clamp_(0, vocab - 1)
    places = torch.arange(longest, device=texts.device)
    there = (places >= skips[:, None]) & (places < ends[:, None])
    prompt = places < prompts[:, None]
    counts, found = (
        torch.zeros(said.shape[0], width, dtype=torch.int32, device=texts.device).scatter_add_(1, said, kept.int())
        for width, kept in ((vocab, there & ~prompt), (words * 32, there & prompt))
    )
    bits = (found > 0).view(-1, words, 32).int() << torch.arange(32, dtype=torch.int32, device=texts.device)
    return counts, bits.sum(2, dtype=torch.int32)


def unpacked(bits: Tensor, width: int) -> Tensor:
    """Packed bits int32 [n, words] as bool [n, width]."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (((bits[:, :, None] >> places) & 1) != 0).flatten(1)[:, :width]
