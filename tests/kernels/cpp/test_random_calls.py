"""Every compiled function, called with random sizes: zero rows, one more kept than there are, one head, odd widths."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from troupellm.tests.support.kernels.compiled_code import needs_compiled_code
from troupellm.tests.support.kernels.random_calls import PRODUCTS
from troupellm.tests.support.kernels.random_decoders import DECODERS

CALLS = int(os.environ.get("TROUPE_RANDOM_CALLS", "15"))
"""Of each function; `make asan` makes 2,000."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    needs_compiled_code()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*PRODUCTS, *DECODERS])
def test_calls_of_random_sizes_give_the_reference(name: str) -> None:
    calls = (PRODUCTS | DECODERS)[name]
    calls(np.random.default_rng(1), CALLS)
