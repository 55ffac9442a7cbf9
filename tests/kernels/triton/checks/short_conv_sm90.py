"""The short convolution, compiled for sm_90 at the shapes of LFM2-1.2B."""

from typing import Any

import pytest

from troupellm.kernels.common.triton_offline import compile_for
from troupellm.kernels.short_conv.triton_conv import CONV, conv_kernel, keep_kernel


@pytest.mark.parametrize("kernel", [conv_kernel, keep_kernel])
def test_nothing_is_spilled(kernel: Any) -> None:
    names = {"conv_kernel": ("weight", "bias", "out"), "keep_kernel": ()}[kernel.__name__]
    places = {"conv_kernel": ("slots", "begins", "owner"), "keep_kernel": ("slots", "begins", "counts")}
    arguments = {
        **dict.fromkeys(("x", "state", *names), "*bf16"),
        **dict.fromkeys(places[kernel.__name__], "*i64"),
        "channels": "i32",
    }
    report = compile_for(kernel, arguments, CONV, {"TAPS": 3, **({"BIAS": False} if names else {})})
    assert report.spilled_bytes == 0
    assert report.registers * CONV.warps * 32 <= 65536
