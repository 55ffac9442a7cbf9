"""Tests of compiled code are skipped where there is none: the build knows that, a look for a compiler does not."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from troupellm.kernels import decoder_layers, native
from troupellm.kernels.linear import native as products
from troupellm.kernels.native import build
from troupellm.kernels.paged_attention import native as attention
from troupellm.kernels.quantized import coded_cpu, int8_cpu
from troupellm.kernels.sampling import native as sampling

REMEMBERED = (
    native.load, products.load, attention.load, decoder_layers.load, int8_cpu.compiled, int8_cpu.row_quantizer,
    int8_cpu.many_rows, coded_cpu.load, sampling.compiled,
)  # fmt: skip


def needs_compiled_code() -> None:
    """Skip where nothing was built: without a compiler, with TROUPE_NATIVE=0, after a build that was given up."""
    if native.load() is None:
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
