"""One line for the load log that counts a model's matrix products by kind of quantization."""

from collections import Counter
from collections.abc import Iterator

from troupellm.kernels.fused_moe.stacked import StackedWeight
from troupellm.kernels.linear import PackedLinear


def packed_weights(part: object) -> Iterator[PackedLinear | StackedWeight]:
    """All weights of matrix products in the parts of a model; those of experts may be one for all of them."""
    if isinstance(part, PackedLinear | StackedWeight):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from packed_weights(item)
    elif type(part).__module__.startswith(__name__.partition(".")[0]):
        names = (*getattr(part, "__slots__", ()), *getattr(part, "__dict__", ()))
        for name in names:
            yield from packed_weights(getattr(part, name, None))


def quantization_report(model: object) -> str:
    """One line that counts products by kind; empty if none is quantized."""
    weights = {id(weight): weight for weight in packed_weights(model)}  # there may be several ways to one
    kinds = Counter[str]()
    for weight in weights.values():
        if isinstance(weight, StackedWeight):
            kinds[weight.label or "plain"] += weight.experts
        else:
            kinds[weight.kind or "plain"] += 1
    if set(kinds) <= {"plain"}:
        return ""
    return "products: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
