"""Stored KV blocks that can be found now, by the number of the event that told of each.

The same as all events, compacted: read in the order of their numbers, with what comes meanwhile behind it, they leave a
reader knowing what one knows who has heard everything. A reader is two numbers, so any number of them cost nothing.
"""

from bisect import bisect_right
from typing import NamedTuple

from troupellm.protocol.messages.kv_events import Medium

_MARGIN = 1024


class StoredBlock(NamedTuple):
    medium: Medium
    group: int
    key: bytes
    parent: bytes = b""
    tokens: bytes = b""
    adapter: str = ""


class Standing:
    """There are at most as many as the media have blocks."""

    def __init__(self) -> None:
        self._number: dict[tuple[Medium, int, bytes], int] = {}
        self._blocks: dict[int, StoredBlock] = {}
        self._order: list[int] = []
        """Numbers, ascending; some stand for nothing any more, not many more than do."""

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, number: int, block: StoredBlock) -> None:
        """A block that host memory tells of has the parent that the device told, as long as it is there too."""
        if not block.parent:
            known = self._blocks.get(self._number.get(("device", block.group, block.key), 0))
            block = block if known is None else known._replace(medium=block.medium)
        self.remove(block.medium, block.group, block.key)
        self._number[block.medium, block.group, block.key] = number
        self._blocks[number] = block
        self._order.append(number)
        if len(self._order) > 2 * len(self._blocks) + _MARGIN:
            self._order = list(self._blocks)

    def remove(self, medium: Medium, group: int, key: bytes) -> None:
        """Nothing happens if it is not here."""
        number = self._number.pop((medium, group, key), None)
        if number is not None:
            del self._blocks[number]

    def clear(self, medium: Medium) -> None:
        for name, number in list(self._number.items()):
            if name[0] == medium:
                del self._number[name]
                del self._blocks[number]
        self._order = list(self._blocks)

    def page(self, after: int, until: int, most: int) -> list[tuple[int, StoredBlock]]:
        """Up to `most` blocks whose numbers are behind `after` and not behind `until`, ascending."""
        found: list[tuple[int, StoredBlock]] = []
        order, place = self._order, bisect_right(self._order, after)
        while place < len(order) and order[place] <= until and len(found) < most:
            block = self._blocks.get(order[place])
            if block is not None:
                found.append((order[place], block))
            place += 1
        return found
