"""Which blocks follow a known prefix, for hits that end inside a block."""

from bisect import bisect_left, insort


class Branches:
    """Blocks by the key of the prefix before them, ordered by their tokens.

    In that order the block with the longest match stands next to where the wanted tokens would stand, so a look-up
    takes the logarithm of their number, also when thousands of prompts go different ways from one system prompt.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return sum(len(branch) for branch in self._blocks.values())

    def add(self, parent: bytes, tokens: bytes, block: int) -> None:
        """tokens: int32, those whose KV the block holds behind the prefix named `parent`."""
        branch = self._blocks.get(parent)
        if branch is None:
            self._blocks[parent] = [(tokens, block)]
        else:
            insort(branch, (tokens, block))

    def remove(self, parent: bytes, tokens: bytes, block: int) -> None:
        """What was added."""
        branch = self._blocks[parent]
        if len(branch) == 1:
            del self._blocks[parent]
        else:
            del branch[bisect_left(branch, (tokens, block))]

    def longest(self, parent: bytes, wanted: bytes) -> tuple[int, int] | None:
        """The block whose first tokens are as many as possible of `wanted`, and how many; None when not even one."""
        branch = self._blocks.get(parent)
        if branch is None:
            return None
        place = bisect_left(branch, (wanted, -1))
        best = None
        most = 0
        for tokens, block in branch[max(0, place - 1) : place + 1]:
            common = common_tokens(tokens, wanted)
            if common > most:
                most, best = common, block
        return None if best is None else (best, most)

    def holds(self, parent: bytes, tokens: bytes, block: int) -> bool:
        """Whether it was added and not removed."""
        return (tokens, block) in self._blocks.get(parent, ())

    def clear(self) -> None:
        self._blocks.clear()


def common_tokens(first: bytes, second: bytes) -> int:
    """How many int32 both begin with."""
    shorter = min(len(first), len(second))
    differing = int.from_bytes(first[:shorter], "little") ^ int.from_bytes(second[:shorter], "little")
    return ((differing & -differing).bit_length() - 1) // 32 if differing else shorter // 4
