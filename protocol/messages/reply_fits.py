"""The shape check of a worker's reply to a step, shared by the worker actor and the scheduler."""

from troupellm.protocol.messages.worker import StepResult


def fits(rows: tuple[int, ...], epochs: tuple[int, ...], result: StepResult) -> bool:
    """Whether the columns fit each other and name what the plan named, in its order."""
    counts = result.token_counts
    same = result.rows == rows and result.epochs == epochs
    return same and len(counts) == len(rows) and sum(counts) == len(result.tokens)
