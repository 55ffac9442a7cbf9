"""Tensors of a model's own layers for further tokens (multi-token prediction), which the model itself does not need.

DeepSeek and GLM store them as layers behind the last one, with `eh_proj`, `enorm`, `hnorm` and `shared_head`; Qwen,
MiMo and ERNIE under a module whose name begins with `mtp`.
"""

import re
from collections.abc import Iterable

_MODULE = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
_LAYER = re.compile(r"^(.*?\blayers\.(\d+)\.)(\w+)")
_MARKS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})


def next_token_tensors(names: Iterable[str], num_layers: int) -> list[str]:
    """The names that belong to such layers.

    Args:
        names: of all tensors of a checkpoint.
        num_layers: of the model itself.
    """
    names = list(names)
    behind = {name: match for name in names if (match := _LAYER.match(name)) and int(match[2]) >= num_layers}
    marked = {match[1] for match in behind.values() if match[3] in _MARKS}
    return [name for name in names if _MODULE.search(name) or (name in behind and behind[name][1] in marked)]
