"""Acceptance by lot instead of by the model, for benchmarks: how fast are steps that keep so many tokens on average?

The tokens that come out are the drafts, and not what the model would have written.
"""

from troupellm.kernels.sampling.noise import uniform

PURPOSE_ACCEPTANCE = 1
"""See `kernels.sampling.noise.stream_key`."""


class SyntheticAcceptance:
    """Accepts each draft with the same probability, given that the one before it was, so that steps give a wanted
    number of tokens on average where `most` drafts are verified."""

    def __init__(self, length: float, most: int) -> None:
        """
        Args:
            length: mean tokens of a step and row, the one behind the last accepted draft included: 1..most + 1.

        Raises:
            ValueError: no such length.
        """
        if not 1 <= length <= most + 1:
            raise ValueError(f"synthetic_acceptance_length must be 1..{most + 1}, not {length}")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if 1 + sum(middle**count for count in range(1, most + 1)) < length:
                low = middle
            else:
                high = middle
        self.probability = high

    def count(self, stream: int, position: int, drafts: int) -> int:
        """How many of a row's drafts are accepted, of which the first would stand at `position`.

        Args:
            stream: a `stream_key` of the row for PURPOSE_ACCEPTANCE.
        """
        for index in range(drafts):
            if uniform(stream, position + index) >= self.probability:
                return index
        return drafts
