"""Tests of compiled code are skipped where there is none: the build knows that, a look for a compiler does not."""

import pytest

from troupellm.kernels import native


def needs_compiled_code() -> None:
    """Skip where nothing was built: without a compiler, with TROUPE_NATIVE=0, after a build that was given up."""
    if native.load() is None:
        pytest.skip("no compiled code")
