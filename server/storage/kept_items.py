"""The items of a stored conversation that still count after a compaction."""

from typing import Any

COMPACTION = "compaction"
_SYSTEM = ("system", "developer")


def after_compaction(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that still count: the system's messages at the start, the last compaction, and the items behind it."""
    places = [place for place, item in enumerate(items) if item.get("type") == COMPACTION]
    if not places:
        return items
    system = (item.get("type", "message") == "message" and item.get("role") in _SYSTEM for item in items)
    first = next((place for place, leads in enumerate(system) if not leads), 0)
    return [*items[:first], *items[places[-1] :]]
