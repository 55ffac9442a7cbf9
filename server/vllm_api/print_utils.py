"""Prints vectors as vLLM's example scripts do."""

from collections.abc import Sequence

_SHOWN = 4


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector, and how many it has."""
    first = ", ".join(map(str, embeds[:_SHOWN]))
    more = ", ..." if len(embeds) > _SHOWN else ""
    print(f"{prefix}: [{first}{more}] (size={len(embeds)})")
