"""Rows and memory of kernels' checks with contents that may not be read."""

import pytest
import torch

from troupellm.kernels.sampling.noise import position_keys, stream_key


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN, and of indices that are nowhere."""
    plain = torch.empty

    def empty(*shape: object, **options: object) -> torch.Tensor:
        tensor = plain(*shape, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", empty)


def keys_of(rows: int) -> torch.Tensor:
    """int32 [rows, 2], of a draw of each row."""
    streams = torch.tensor([stream_key(seed, 0) for seed in range(rows)])
    return position_keys(streams, torch.arange(rows) * 7)


def between_nan(x: torch.Tensor) -> torch.Tensor:
    """The same rows, with NaN on both sides of each."""
    wide = torch.full((x.shape[0], x.shape[1] + 9), float("nan"), device=x.device)
    wide[:, 4:-5] = x
    return wide[:, 4:-5]
