"""Where cut rows leave their sums."""

import threading

import torch
from torch import Tensor

from troupellm.kernels.paged_attention.device_plan import workspace

CPU = torch.device("cpu")


def test_layers_share_a_workspace_and_threads_do_not() -> None:
    """Two engines' threads launch kernels between each other's, and each merges what it has left itself."""
    mine = workspace(CPU, 3, 16, 8)
    assert [part.shape for part in mine] == [(6, 16, 8), (6, 2, 16)]
    assert workspace(CPU, 3, 16, 8)[0] is mine[0]
    assert workspace(CPU, 3, 16, 16)[0] is not mine[0]
    others = list[tuple[Tensor, Tensor]]()
    thread = threading.Thread(target=lambda: others.append(workspace(CPU, 3, 16, 8)))
    thread.start()
    thread.join()
    assert others[0][0].data_ptr() != mine[0].data_ptr()


def test_the_workspace_of_a_size_is_never_replaced() -> None:
    first = workspace(CPU, 1, 16, 16)[0]
    for programs in range(2, 100):
        workspace(CPU, programs, 16, 16)
    assert workspace(CPU, 1, 16, 16)[0] is first
