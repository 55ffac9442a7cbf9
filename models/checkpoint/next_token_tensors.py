"""Tensors of a model's own layers for further tokens (multi-token prediction), which the model itself does not need.

DeepSeek and GLM store them as layers behind the last one, with or without `eh_proj`, `enorm`, `hnorm` and
`shared_head`; Qwen, MiMo and ERNIE under a module whose name begins with `mtp`.
"""

import re
from collections.abc import Iterable

_MODULE = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
_LAYER = re.compile(r"(?:model\.|language_model\.){0,2}layers\.(\d{1,9})\.")
"""Names of the decoder's layers; towers for images count their own."""


def next_token_tensors(names: Iterable[str], num_layers: int) -> list[str]:
    """The names that belong to such layers.

    Args:
        names: of all tensors of a checkpoint.
        num_layers: of the model itself.
    """
    return [name for name in names if _MODULE.search(name) or _is_behind(name, num_layers)]


def _is_behind(name: str, num_layers: int) -> bool:
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers
