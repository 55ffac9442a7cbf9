"""The memory of an object's tensors, counted from the memory itself."""

import torch
from torch import Tensor

from troupellm.models.layers.decoder import Decoder


def held_by(decoder: Decoder) -> int:
    """Bytes of a decoder's weights, in all formats; tables of rotations do not count."""
    parts = (decoder.embedding, decoder.layers, decoder.norm, decoder.head, decoder.score)
    found: dict[int, int] = {}
    _collect(parts, found, set())
    return sum(found.values())


def _collect(part: object, found: dict[int, int], seen: set[int]) -> None:
    """Bytes by the address of their memory, which several tensors may share."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        if part.is_mkldnn:
            found[torch.ops.mkldnn.data_ptr(part)] = torch.ops.mkldnn._nbytes(part)
        else:
            storage = part.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(part, list | tuple):
        for item in part:
            _collect(item, found, seen)
    elif type(part).__module__.startswith("troupellm"):
        names = {name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())}
        for name in names | set(getattr(part, "__dict__", ())):
            _collect(getattr(part, name, None), found, seen)
