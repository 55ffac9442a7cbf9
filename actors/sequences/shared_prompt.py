"""The blocks of a prompt that was computed once for all sequences of its request."""


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
