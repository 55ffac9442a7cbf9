"""A causal convolution over a few positions of each channel, whose last inputs are kept between steps.

Layers of hybrid models (LFM2, Mamba-2, gated delta nets) mix neighbouring positions so. The sum over the taps has a
fixed order, and no position looks at how its row was cut into spans: results are the same bits for every cut.
"""

from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.short_conv.spans import ConvSpans


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, spans: ConvSpans) -> Tensor:
    """out[t, c] = bias[c] + sum over j of weight[j, c] * (input of channel c, taps - 1 - j positions before t).

    Positions before a span are read from the row's slot of the state, which then gets the span's last inputs.

    Args:
        x: [tokens, channels], any float type; left as it is.
        weight: [taps, channels], of the type of `x`; at least two taps, the last one for the position itself.
        bias: [channels]; None is none.
        state: [slots, taps - 1, channels], of the type of `x`: each row's last inputs, the latest one last.
        spans: `conv_spans` of the rows in `x`, for so many taps.

    Returns:
        [tokens, channels], contiguous; sums are float32.
    """
    if by_kernels(x.device):
        from troupellm.kernels.short_conv.triton_conv import short_conv_triton

        return short_conv_triton(x, weight, bias, state, spans)
    taps = weight.shape[0]
    extended = x.new_empty(spans.num_extended, x.shape[1])
    extended[spans.before] = state[spans.slots].flatten(0, 1)
    extended[spans.places] = x
    total = extended.index_select(0, spans.first).float() * weight[0].float()
    for tap in range(1, taps):
        total.addcmul_(extended.index_select(0, spans.first + tap).float(), weight[tap].float())
    if bias is not None:
        total += bias.float()
    state[spans.slots] = extended[spans.after].view(-1, taps - 1, x.shape[1])
    return total.to(x.dtype)
