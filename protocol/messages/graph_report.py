"""The worker's report on its CUDA graphs."""

import msgspec


class GraphReport(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How they stand; told when there are more of them, or fewer."""

    captured: int
    """That decode steps are replayed from."""
    missing: int
    """That are still to be captured: while nothing is to be done, and now and then between steps."""
    given_up: int = 0
    """That will not be captured, since there is no memory for them."""
    seconds: float
    """That capturing has taken so far."""
    bytes: int
    """Device memory that they take."""
