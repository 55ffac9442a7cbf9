"""The smallest kernel, which `triton_probe` launches."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def increment_kernel(values, ELEMENTS: tl.constexpr):
    """Add one to each of `values`, int32 [ELEMENTS]."""
    places = values + tl.arange(0, ELEMENTS)
    tl.store(places, tl.load(places) + 1)
