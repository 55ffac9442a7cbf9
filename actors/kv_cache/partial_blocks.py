"""Which blocks follow a known prefix, for hits that end inside a block."""

from bisect import bisect_left, insort


class Branches:
    """Blocks by the key of the prefix before them, ordered by their tokens.

    In that order the block with the longest match stands next to where the wanted tokens would stand, so a look-up
    takes the logarithm of their number, also when thousands of prompts go different ways from one system prompt.
    Mostly one block follows a prefix, and stands in the table without a list around it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._parents: list[bytes | None] = [None] * num_blocks
        self._tokens = [b""] * num_blocks
        self._blocks: dict[bytes, int | list[int]] = {}

    def __contains__(self, block: int) -> bool:
        return self._parents[block] is not None

    def add(self, parent: bytes, tokens: bytes, block: int) -> None:
        """tokens: int32, those whose KV the block, which is in no branch, holds behind the prefix named `parent`."""
        self._parents[block] = parent
        self._tokens[block] = tokens
        other = self._blocks.setdefault(parent, block)
        if other != block:
            if isinstance(other, int):
                other = self._blocks[parent] = [other]
            insort(other, block, key=self._tokens.__getitem__)

    def remove(self, block: int) -> None:
        """Idempotent."""
        parent = self._parents[block]
        if parent is None:
            return
        branch = self._blocks[parent]
        if isinstance(branch, int):
            del self._blocks[parent]
        else:
            place = bisect_left(branch, self._tokens[block], key=self._tokens.__getitem__)
            branch.pop(branch.index(block, place))
            if len(branch) == 1:
                self._blocks[parent] = branch[0]
        self._parents[block] = None

    def longest(self, parent: bytes, wanted: bytes) -> tuple[int, int] | None:
        """The block whose first tokens are as many as possible of `wanted`, and how many; None when not even one."""
        branch = self._blocks.get(parent)
        if branch is None:
            return None
        tokens = self._tokens
        if isinstance(branch, int):
            near = [branch]
        else:
            place = bisect_left(branch, wanted, key=tokens.__getitem__)
            near = branch[max(0, place - 1) : place + 1]
        block = max(near, key=lambda block: common_tokens(tokens[block], wanted))
        most = common_tokens(tokens[block], wanted)
        return (block, most) if most else None

    def clear(self) -> None:
        self._blocks.clear()
        self._parents = [None] * len(self._parents)

    def assert_invariants(self) -> None:
        """Every block stands where its tokens belong, and nowhere else."""
        found = []
        for parent, branch in self._blocks.items():
            blocks = [branch] if isinstance(branch, int) else branch
            assert isinstance(branch, int) or len(branch) > 1, "a list around one block"
            assert all(self._parents[block] == parent for block in blocks), "a block stands behind another prefix"
            spelled = [self._tokens[block] for block in blocks]
            assert spelled == sorted(spelled), "a branch is out of order"
            found += blocks
        assert sorted(found) == [block for block, parent in enumerate(self._parents) if parent is not None]


def common_tokens(first: bytes, second: bytes) -> int:
    """How many int32 both begin with."""
    shorter = min(len(first), len(second))
    differing = int.from_bytes(first[:shorter], "little") ^ int.from_bytes(second[:shorter], "little")
    return ((differing & -differing).bit_length() - 1) // 32 if differing else shorter // 4
