"""The first and the last operations of a decode step: from the rows' last tokens to the inputs of all layers, and from
logits to the next tokens. On a GPU the first take one launch, the last two to four."""

from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.decode_io.reference import begin_reference, finish_reference, gathered
from troupellm.kernels.decode_io.spec import Beginning, Draws

__all__ = ["Beginning", "Draws", "begin", "finish", "gathered"]


def begin(
    slots: Tensor,
    ends: Tensor,
    counts: Tensor | None,
    texts: Tensor,
    block_tables: Tensor,
    angle_table: Tensor | None,
    *,
    queries: int,
    block_size: int,
    kv_heads: int,
    scratch: int,
) -> Beginning:
    """The last `queries` positions of each row; static in all but its tensors' content.

    Args:
        slots: int64 [rows].
        ends: int64 [rows], keys with this step; 0 is a row that pads.
        counts: int64 [rows], the number of the last positions that the row is to compute; None is all. Earlier ones are
            padding: they belong to the scratch slot, whose blocks are never read.
        texts: int32 [slots, length], every row's tokens, contiguous.
        block_tables: int32 [groups, slots, width], contiguous.
        angle_table: [positions, width], contiguous; None if the model has no rotation.
    """
    if by_kernels(texts.device):
        from troupellm.kernels.decode_io.triton_inputs import begin_triton as function
    else:
        function = begin_reference
    return function(
        slots,
        ends,
        counts,
        texts,
        block_tables,
        angle_table,
        queries=queries,
        block_size=block_size,
        kv_heads=kv_heads,
        scratch=scratch,
    )


def finish(logits: Tensor, slots: Tensor, ends: Tensor, texts: Tensor, draws: Draws | None) -> Tensor:
    """One token for each row, appended to the row's text. A failed row may be in the next plan already, so its text
    must hold token ids.

    Args:
        logits: float32 [rows, vocab], the numbers of a row side by side; left as they are.
        slots, ends: int64 [rows]: tokens go to texts[slot, end].
        texts: int32 [slots, length], contiguous; written to.
        draws: None where every row takes the likeliest token, the first of equal ones.

    Returns:
        int64 [rows]; -1 where the logits are not fit to choose from.
    """
    if by_kernels(logits.device):
        from troupellm.kernels.decode_io.triton_outputs import finish_triton

        return finish_triton(logits, slots, ends, texts, draws)
    return finish_reference(logits, slots, ends, texts, draws)
