"""What a request keeps of a prompt that was computed for all of its sequences."""


class Trunk:
    """Blocks that hold the first `num_positions` positions of every sequence of a request; what follows in the last one
    is somebody's own."""

    __slots__ = ("cache_age", "num_positions", "tables")

    def __init__(self, tables: list[list[int]], num_positions: int, cache_age: int) -> None:
        self.tables = tables
        """Blocks per group."""
        self.num_positions = num_positions
        self.cache_age = cache_age
        """How often the prefix cache had been reset when the blocks were given out."""
