"""Scores of a vocabulary, as float32."""

import pytest
import torch

from troupellm.kernels import linear
from troupellm.kernels.linear import norm_linear, norm_scores, pack

META = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_processor_they_are_the_product(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    packed, x, norm = (
        pack(torch.randn(48, 32, dtype=dtype)),
        torch.randn(5, 32, dtype=dtype),
        torch.rand(32, dtype=dtype),
    )
    expected = norm_linear(x, norm, 1e-5, packed).float()
    out = torch.empty(5, 48)
    assert torch.equal(norm_scores(x, norm, 1e-5, packed), expected)
    assert norm_scores(x, norm, 1e-5, packed, out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_elsewhere_sums_are_left_where_torch_can_leave_them(
    leaves: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, product = list[object](), torch.mm

    def watched(*args: torch.Tensor, **more: object) -> torch.Tensor:
        asked.append(more["out"])
        return product(*args, **more)

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setattr(linear, "LEAVES_SUMS", leaves)
    packed = pack(torch.empty(48, 32, dtype=torch.bfloat16, device=META))
    x, norm = (torch.empty(*shape, dtype=torch.bfloat16, device=META) for shape in ((5, 32), (32,)))
    out = torch.empty(5, 48, device=META) if given else None
    found = norm_scores(x, norm, 1e-5, packed, out)
    assert (found.shape, found.dtype) == ((5, 48), torch.float32)
    assert asked == ([out] if leaves else [])
