"""Puts plain weights into the blocks of GGUF files: four to eight bits.

With four and five bits 32 inputs share a scale and a minimum. Both minimise the weighted squared error: candidates for
the scale round the weights, and a weighted least-squares fit of the rounded codes gives scale and minimum (after ggml's
`make_qkx2_quants`). Large weights count more, since their inputs' products do.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from troupellm.kernels import cpp
from troupellm.kernels.cpp import guard
from troupellm.kernels.cpp.checks import check
from troupellm.kernels.quantized_linear.base import require
from troupellm.kernels.quantized_linear.gguf import LAYOUTS, GgufBlocks

GROUP = 32
"""Inputs that share a scale and a minimum."""
CANDIDATES = 21
"""Scales that are tried for a group, from a range one code narrower than its numbers to one code wider."""
WHOLE_SCALES = 63
"""The largest scale and minimum of a K block, whose scales are whole numbers of six bits."""
SLAB_GROUPS = 2**15
"""Groups that are searched together: their intermediate tensors stay in the caches."""


class Fit(NamedTuple):
    """w = scale * q + low, each float32 [groups, 1]; low is at most 0."""

    scale: Tensor
    low: Tensor


def block_layout(bits: int, columns: int) -> str | None:
    """The layout for so many bits and inputs: K blocks of 256 inputs, or blocks of 32; None if neither divides them.

    Args:
        bits: 4, 5 or 6; blocks of 32 have eight instead of six.
    """
    if columns % LAYOUTS[f"Q{bits}_K"].weights == 0:
        return f"Q{bits}_K"
    return {4: "Q4_1", 5: "Q5_1", 6: "Q8_0"}[bits] if columns % GROUP == 0 else None


def quantize_blocks(weight: Tensor, layout: str) -> GgufBlocks:
    """Quantize a weight [out_features, in_features] of any float type.

    Args:
        layout: one of `QUANTIZED`, as `block_layout` says.

    Raises:
        ValueError: a number is too large for float16 scales, or is not finite.
    """
    require(float(weight.abs().amax()) <= torch.finfo(torch.float16).max, "int4 needs finite numbers of at most 65504")
    groups = weight.reshape(-1, LAYOUTS[layout].weights)
    step = SLAB_GROUPS * GROUP // groups.shape[1]
    pieces = [QUANTIZED[layout](piece.float()) for piece in torch.split(groups, step)]
    data = torch.cat(pieces).view(weight.shape[0], -1)
    return GgufBlocks(data, layout, dtype=weight.dtype)


def _with_minimum(blocks: Tensor, bits: int) -> Tensor:
    """Q4_1 or Q5_1: bytes uint8 [blocks, size] of numbers float32 [blocks, 32]."""
    most = 2**bits - 1
    scale, low = (part.half() for part in search(blocks, most))
    codes = _codes(blocks, Fit(scale.float(), low.float()), most)
    high = [_high_bits(codes, 1)] if bits == 5 else []
    return torch.cat((torch.cat((scale, low), dim=1).view(torch.uint8), *high, _nibbles(codes, 16)), dim=1)


def _with_minima(blocks: Tensor, bits: int) -> Tensor:
    """Q4_K or Q5_K: bytes uint8 [blocks, size] of numbers float32 [blocks, 256]."""
    most, groups = 2**bits - 1, blocks.view(-1, GROUP)
    found = search(groups, most)
    parts = found.scale.view(-1, 8), -found.low.view(-1, 8)
    steps = [(part.amax(1, keepdim=True) / WHOLE_SCALES).half() for part in parts]
    whole = [_rounded(part, step, 0, WHOLE_SCALES) for part, step in zip(parts, steps, strict=True)]
    scale, minimum = ((part * step.float()).view(-1, 1) for part, step in zip(whole, steps, strict=True))
    codes = _codes(groups, Fit(scale, -minimum), most).view(-1, 8 * GROUP)
    high = [_high_bits(codes, GROUP)] if bits == 5 else []
    head = torch.cat(steps, dim=1).view(torch.uint8)
    return torch.cat((head, _packed_scales(*whole), *high, _nibbles(codes, GROUP)), dim=1)


def _six_bits(blocks: Tensor) -> Tensor:
    """Q6_K: the largest number of 16 is 32 steps from zero; scales are whole numbers of eight bits."""
    groups = blocks.view(-1, 16, 16)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]
    scale = extreme / -32
    step = (scale.gather(1, scale.abs().argmax(1, keepdim=True)) / -128).half()
    whole = _rounded(scale, step, -128, 127)
    exact = (whole * step.float())[..., None]
    codes = _rounded(groups, exact, -32, 31).view(-1, 256).add_(32).to(torch.uint8)
    pairs = (codes >> 4).view(-1, 2, 4, 32)
    high = pairs[:, :, 0] | (pairs[:, :, 1] << 2) | (pairs[:, :, 2] << 4) | (pairs[:, :, 3] << 6)
    scales = whole.to(torch.int8).view(torch.uint8)
    return torch.cat((_nibbles(codes, 64), high.flatten(1), scales, step.view(torch.uint8)), dim=1)


def _eight_bits(blocks: Tensor) -> Tensor:
    """Q8_0: the largest number of 32 is 127 steps from zero."""
    step = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = _rounded(blocks, step, -127, 127).to(torch.int8)
    return torch.cat((step.view(torch.uint8), codes.view(torch.uint8)), dim=1)


QUANTIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_1": functools.partial(_with_minimum, bits=4),
    "Q5_1": functools.partial(_with_minimum, bits=5),
    "Q4_K": functools.partial(_with_minima, bits=4),
    "Q5_K": functools.partial(_with_minima, bits=5),
    "Q6_K": _six_bits,
    "Q8_0": _eight_bits,
}
"""Layouts that weights can be put into: from numbers float32 [blocks, weights] to bytes uint8 [blocks, size]."""


def search(groups: Tensor, most: int) -> Fit:
    """The best scale and minimum of each group for codes of 0 to `most`, by compiled code where there is some.

    Args:
        groups: float32 [groups, 32].
        most: 1 to 255.
    """
    compiled = _compiled() if groups.device.type == "cpu" else None
    return search_reference(groups, most) if compiled is None else _search_compiled(compiled, groups, most)


@functools.cache
def _compiled() -> cpp.Function | None:
    library = cpp.load()
    if library is None:
        return None
    function = library.function("search_blocks", "piippi")
    probe = torch.sin(torch.arange(8.0 * GROUP)).view(8, GROUP) * torch.arange(8)[:, None]
    found, expected = _search_compiled(function, probe, 15), search_reference(probe, 15)
    agrees = all(torch.allclose(*pair, rtol=1e-3, atol=1e-5) for pair in zip(found, expected, strict=True))
    return cpp.checked(function, agrees, "the search of scales")


def _search_compiled(function: cpp.Function, groups: Tensor, most: int) -> Fit:
    groups = groups.contiguous()
    check("groups", groups, torch.float32, groups.shape[0], GROUP)
    scale, low = guard.empty("scale", groups.shape[0], 1), guard.empty("low", groups.shape[0], 1)
    function(groups.data_ptr(), groups.shape[0], most, scale.data_ptr(), low.data_ptr(), torch.get_num_threads())
    return Fit(scale, low)


def search_reference(groups: Tensor, most: int) -> Fit:
    """`search` by torch."""
    weights = groups.square().mean(1, keepdim=True).sqrt() + groups.abs()
    low, high = groups.amin(1, keepdim=True).clamp(max=0.0), groups.amax(1, keepdim=True)
    spread = (high - low).clamp(min=1e-20)
    best = Fit(spread / most, low)
    least = _error(groups, _codes(groups, best, most), best, weights)
    sums = (weights.sum(1, keepdim=True), (weights * groups).sum(1, keepdim=True))
    for number in range(CANDIDATES):
        tried = Fit(spread / (most - 1 + 0.1 * number), low)
        codes = _codes(groups, tried, most)
        fit = _fitted(groups, codes, weights, *sums)
        error = _error(groups, codes, fit, weights)
        better = error < least
        least = torch.where(better, error, least)
        best = Fit(*(torch.where(better, new, old) for new, old in zip(fit, best, strict=True)))
    return best


def _fitted(groups: Tensor, codes: Tensor, weights: Tensor, total: Tensor, mean: Tensor) -> Fit:
    """Weighted least squares of the groups over their codes; a minimum above zero is zero.

    Args:
        total: sums of the weights [groups, 1]; mean: those of weights times numbers.
    """
    weighted = weights * codes
    first, second = weighted.sum(1, keepdim=True), (weighted * codes).sum(1, keepdim=True)
    cross = (weighted * groups).sum(1, keepdim=True)
    determinant = (total * second - first * first).clamp(min=1e-20)
    scale, low = (total * cross - first * mean) / determinant, (second * mean - first * cross) / determinant
    through_zero = cross / second.clamp(min=1e-20)
    return Fit(torch.where(low > 0, through_zero, scale), low.clamp(max=0.0))


def _error(groups: Tensor, codes: Tensor, fit: Fit, weights: Tensor) -> Tensor:
    return (weights * (codes * fit.scale + fit.low - groups).square()).sum(1, keepdim=True)


def _codes(groups: Tensor, fit: Fit, most: int) -> Tensor:
    """float32 [groups, 32] of whole numbers from 0 to `most`; 0 where the scale is 0."""
    safe = torch.where(fit.scale == 0, torch.inf, fit.scale)
    return ((groups - fit.low) / safe).round_().clamp_(0, most)


def _rounded(part: Tensor, step: Tensor, least: int, most: int) -> Tensor:
    """Whole multiples of `step`, as float32; 0 where the step is 0."""
    safe = step.float()
    return (part / torch.where(safe == 0, torch.inf, safe)).round_().clamp_(least, most)


def _nibbles(codes: Tensor, half: int) -> Tensor:
    """The low four bits, in pairs that lie `half` inputs apart: uint8 [blocks, inputs / 2]."""
    runs = (codes.to(torch.uint8) & 15).view(codes.shape[0], -1, 2, half)
    return (runs[:, :, 0] | (runs[:, :, 1] << 4)).flatten(1)


def _high_bits(codes: Tensor, run: int) -> Tensor:
    """The fifth bits: those of runs of `run` inputs in one bit of their bytes each, uint8 [blocks, inputs / 8]."""
    bits = (codes.to(torch.uint8) >> 4).view(codes.shape[0], -1, 8, run)
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
    return (bits << places).sum(2, dtype=torch.uint8).flatten(1)


def _packed_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and eight minima of six bits as 12 bytes, uint8 [blocks, 12]."""
    scale, minimum = scales.to(torch.uint8), minima.to(torch.uint8)
    first = scale[:, :4] | (scale[:, 4:] >> 4 << 6)
    second = minimum[:, :4] | (minimum[:, 4:] >> 4 << 6)
    third = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    return torch.cat((first, second, third), dim=1)
