"""Trees of drafts for the device: the nodes that each token sees, for every window that layers have."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.paged_attention.device_plan import DeviceTree
from troupellm.models.batch.spans import Spans
from troupellm.models.layers.cache_layout import CacheLayout
from troupellm.models.speculation.verify_batch import VerifyBatch

Ints = NDArray[np.int64]
TEXT = "text"
"""Key of the tokens' positions in the text, beside the masks."""


def host_trees(
    verify_batch: VerifyBatch | None, spans: Spans, places: Ints, owner: Ints, order: Ints, layout: CacheLayout
) -> dict[tuple[str, int | None], Ints]:
    """Numbers to be sent, by what they are and the window that they are for; none where no row has a tree.

    Args:
        places: [tokens] in the cache.
        owner: [tokens] index of each token's span.
        order: in which the rows are planned.
    """
    if verify_batch is None or not verify_batch.trees:
        return {}
    text = verify_batch.positions(spans, places, owner)
    found: dict[tuple[str, int | None], Ints] = {(TEXT, None): text}
    for window in dict.fromkeys(view.window for view in layout.views):
        mask = verify_batch.tree(spans, places, owner, text, window)
        assert mask is not None
        found["bases", window], found["nodes", window] = mask.bases[order], mask.seen.view(np.int64)
    return found


def device_trees(
    names: Sequence[tuple[str, int | None]], sent: Sequence[Tensor]
) -> tuple[Tensor | None, dict[int | None, DeviceTree] | None]:
    """Positions in the text, and the trees by window, of what `host_trees` gave and was sent; None without any."""
    if not names:
        return None, None
    text = sent[0]
    narrow = text.to(torch.int32)
    trees = {
        names[1 + 2 * number][1]: DeviceTree(bases.to(torch.int32), nodes, narrow)
        for number, (bases, nodes) in enumerate(zip(sent[1::2], sent[2::2], strict=True))
    }
    return text, trees
