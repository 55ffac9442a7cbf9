"""Whether a sequence says the same again and again."""

from array import array

from troupellm.protocol.params.sampling_checks import RepetitionDetection


class Repetition:
    """Follows one sequence, token by token: 5 us for each at the widest pattern."""

    __slots__ = ("_longest", "_min_count", "_runs", "_shortest")

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._shortest, self._longest = wanted.min_pattern_size, wanted.max_pattern_size
        self._min_count = wanted.min_count
        self._runs: dict[int, int] = {}
        """By pattern size, how many last tokens are each the same as the one so many before; zeros are left out."""

    def follow(self, tokens: "array[int]", num_prompt_tokens: int) -> bool:
        """Take in the last of a sequence's tokens; tells whether the generated ones end in the repetition."""
        last = len(tokens) - 1
        token, runs = tokens[last], self._runs
        begin = max(num_prompt_tokens, last - self._longest)
        sizes = [last - place for place, other in enumerate(tokens[begin:last], begin) if other == token]
        self._runs = {size: runs.get(size, 0) + 1 for size in sizes if size >= self._shortest}
        wanted = self._min_count - 1
        return any(run >= size * wanted for size, run in self._runs.items())
