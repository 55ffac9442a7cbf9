"""Small parts of requests and sequences."""

from array import array
from typing import NamedTuple

from troupellm.protocol.params.sampling_checks import RepetitionDetection


class SharedPrompt:
    """Blocks that hold the first `num_positions` positions of every sequence of a request. Later positions of the last
    block belong to one sequence."""

    __slots__ = ("cache_age", "num_positions", "tables")

    def __init__(self, tables: list[list[int]], num_positions: int, cache_age: int) -> None:
        self.tables = tables
        """Blocks per group."""
        self.num_positions = num_positions
        self.cache_age = cache_age
        """How often the prefix cache had been reset when the blocks were given out."""

    def before(self, position: int, block_size: int) -> tuple[list[list[int]], tuple[int, ...], int]:
        """Its part for a sequence that starts at `position` or before.

        Returns:
            per group the full blocks, the block of each group to copy from behind those, and how many positions of it.
        """
        full, rest = divmod(min(self.num_positions, position), block_size)
        ends = tuple(table[full] for table in self.tables) if rest else ()
        return [table[:full] for table in self.tables], ends, rest


class Repetition:
    """Follows one sequence, token by token: 5 us for each at the widest pattern."""

    __slots__ = ("_longest", "_min_count", "_runs", "_shortest")

    def __init__(self, wanted: RepetitionDetection, tokens: "array[int]", num_prompt_tokens: int) -> None:
        """tokens: those of the sequence so far."""
        self._shortest, self._longest = wanted.min_pattern_size, wanted.max_pattern_size
        self._min_count = wanted.min_count
        self._runs: dict[int, int] = {}
        """By pattern size, how many last tokens are each the same as the one so many before; zeros are left out."""
        for end in range(num_prompt_tokens + 1, len(tokens) + 1):
            self.follow(tokens[:end], num_prompt_tokens)

    def follow(self, tokens: "array[int]", num_prompt_tokens: int) -> bool:
        """Take in the last of a sequence's tokens; tells whether the generated ones end in the repetition."""
        last = len(tokens) - 1
        token, runs = tokens[last], self._runs
        begin = max(num_prompt_tokens, last - self._longest)
        sizes = [last - place for place, other in enumerate(tokens[begin:last], begin) if other == token]
        self._runs = {size: runs.get(size, 0) + 1 for size in sizes if size >= self._shortest}
        wanted = self._min_count - 1
        return any(run >= size * wanted for size, run in self._runs.items())


class HostHit(NamedTuple):
    group: int
    nth: int
    """In the sequence's table."""
    block: int
    key: bytes
    """Group included."""
    chained: bytes
    """The same without it."""
    parent: bytes
    """Key of the prefix before the block."""
    tokens: bytes
    """The block's own, int32."""
    cache_age: int
    """How often the prefix cache had been reset."""
    whole: bool = False
    """The block has more than tokens: it is never found by its first ones."""


class DraftCounts:
    """`steps` are those in which a sequence had drafts verified."""

    __slots__ = ("accepted", "drafted", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
