"""A model of `transformers` with the weights of a GGUF file, expanded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from troupellm.models.gguf.weights import GgufWeights

HEAD = "lm_head.weight"
MERGED, APART = "gate_up_proj", ("gate_proj", "up_proj")


@torch.no_grad()
def fill(
    model: Any,
    path: Path,
    dtype: torch.dtype,
    head_dim: int,
    *,
    tied: bool,
    taken: Callable[[int], None] = lambda _: None,
) -> None:
    """Put the file's tensors in the place of the model's.

    Args:
        model: as `transformers` makes it; its parameters may hold anything.
        head_dim: size of a head.
        tied: whether the head is the embedding.
        taken: called with the bytes of each tensor.

    Raises:
        ModelLoadError: a tensor is missing, has another shape, or is left over.
    """
    stored = GgufWeights(path, dtype, head_dim, taken)
    model.tie_weights()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not (tied and name == HEAD):
            tensor.data = _take(stored, name, tuple(tensor.shape)).to(tensor.dtype)
    stored.finish()


def _take(stored: GgufWeights, name: str, shape: tuple[int, ...]) -> Tensor:
    """One tensor; gate and up of all experts [experts, 2 * size, hidden] may be stored apart."""
    if not name.endswith(MERGED) or stored.has(name):
        return stored.take(name, shape)
    experts, both, hidden = shape
    parts = [stored.take(name.replace(MERGED, part), (experts, both // 2, hidden)) for part in APART]
    return torch.cat(parts, dim=1)


def empty_model(kind: Any, settings: Any, **options: Any) -> Any:
    """A model whose parameters are not drawn.

    Args:
        kind: class of the model.
        settings: its configuration.
        options: of its `_from_config`.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return kind._from_config(settings, **options)
