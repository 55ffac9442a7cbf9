"""A step that found no memory is recognized on every device, also by its text from another process."""

import pytest
import torch

from troupellm.actors.worker.thread_host import found_no_memory
from troupellm.models.worker.main import failed


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_want_of_memory_is_known(error: Exception, expected: bool) -> None:
    assert found_no_memory(error) is expected
    assert found_no_memory(failed(error, loading=False).as_error()) is expected
