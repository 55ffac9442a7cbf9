"""Tests of compiled code are skipped where there is none: the build knows that, a look for a compiler does not."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from troupellm.kernels import cpp
from troupellm.kernels.cpp import build
from troupellm.kernels.fused_decoder import layers
from troupellm.kernels.linear import cpu as products
from troupellm.kernels.paged_attention import cpu as attention
from troupellm.kernels.quantized_linear import cpu_blocks, cpu_int8, cpu_packed
from troupellm.kernels.sampling import cpu as sampling

REMEMBERED = (
    cpp.load, products.load, attention.load, layers.load, cpu_int8.compiled, cpu_int8.row_quantizer,
    cpu_int8.limits, cpu_packed.load, cpu_blocks.load, sampling.compiled,
)  # fmt: skip


def needs_compiled_code() -> None:
    """Skip where nothing was built: without a compiler, with TROUPE_NATIVE=0, after a build that was given up."""
    if cpp.load() is None:
        pytest.skip("no compiled code")


@contextmanager
def torch_alone() -> Iterator[None]:
    """As on a machine without a compiler. Objects made before must be made anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.SWITCH, "0")
        for load in REMEMBERED:
            load.cache_clear()
        try:
            yield
        finally:
            for load in REMEMBERED:
                load.cache_clear()
