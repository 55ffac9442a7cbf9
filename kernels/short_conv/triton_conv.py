"""A short convolution on a GPU: one kernel for the results, then one for the inputs that are kept."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_language import cast
from troupellm.kernels.short_conv.spans import ConvSpans

CONV = Launch(warps=4, stages=1, constants={"BLOCK": 512})


@triton.jit(do_not_specialize=["channels"])
def conv_kernel(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    begins,
    owner,
    channels,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK channels of one token."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < channels
    row = tl.load(owner + token)
    slot, begin = tl.load(slots + row), tl.load(begins + row)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1) + tap
        old = TAPS - 1 + source - begin
        inside, outside = tl.where(source >= begin, channels, 0), tl.where(source >= begin, 0, channels)
        here = tl.load(x + source * channels + columns, columns < inside, 0.0).to(tl.float32)
        kept = tl.load(state + (slot * (TAPS - 1) + old) * channels + columns, columns < outside, 0.0)
        total += (here + kept.to(tl.float32)) * tl.load(weight + tap * channels + columns, there, 0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + columns, there, 0.0).to(tl.float32)
    tl.store(out + token * channels + columns, cast(total, out.dtype.element_ty), there)


@triton.jit(do_not_specialize=["channels"])
def keep_kernel(x, state, slots, begins, counts, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK channels of one row: inputs move towards the front, so each is read before its place is written."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < channels
    slot, begin, count = tl.load(slots + row), tl.load(begins + row), tl.load(counts + row)
    for place in tl.static_range(TAPS - 1):
        source = count - (TAPS - 1) + place
        old = count + place
        inside, outside = tl.where(source >= 0, channels, 0), tl.where(source >= 0, 0, channels)
        here = tl.load(x + (begin + source) * channels + columns, columns < inside, 0.0)
        kept = tl.load(state + (slot * (TAPS - 1) + old) * channels + columns, columns < outside, 0.0)
        found = tl.where(columns < inside, here, kept)
        tl.store(state + (slot * (TAPS - 1) + place) * channels + columns, found, there)


def short_conv_triton(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, spans: ConvSpans) -> Tensor:
    """As `short_conv`."""
    tokens, channels = x.shape
    x, out = x.contiguous(), torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    blocks, taps = triton.cdiv(channels, CONV.constants["BLOCK"]), weight.shape[0]
    conv_kernel[(tokens, blocks)](
        x,
        weight,
        weight if bias is None else bias,
        state,
        out,
        spans.slots,
        spans.begins,
        spans.owner,
        channels,
        TAPS=taps,
        BIAS=bias is not None,
        **CONV.options,
    )
    keep_kernel[(spans.slots.shape[0], blocks)](
        x, state, spans.slots, spans.begins, spans.counts, channels, TAPS=taps, **CONV.options
    )
    return out
