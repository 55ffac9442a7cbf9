"""Kernels are tested on two threads, however many the rest of the suite leaves to a step."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """They share out rows and heads among them, each kernel in its own way."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
