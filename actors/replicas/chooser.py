"""Which replica computes a request: the one where the prompt and the waiting work cost the fewest tokens.

A replica is known to hold the blocks of the prompts that were sent to it, as many as its cache has; the oldest leave
first. A request costs the part of its prompt that is not held, and stands behind the work that the replica has. A held
prefix so saves no more than it is worth, and a hot one spreads once its replica is that much busier than others.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from troupellm.protocol.config.parallel import RouterPolicy

DECODE_COST: Final = 4
"""Prompt tokens that take about as long as one generated token."""
EXPECTED_TOKENS: Final = 256
"""Of an answer, at most: limits say little about how long answers get."""


class Place:
    """A replica, as the chooser knows it."""

    def __init__(self, number: int, block_size: int, num_blocks: int) -> None:
        self.number = number
        self.work = 0
        """Tokens of the requests that are there, as `cost_of` counts them."""
        self.rows = 0
        """Sequences of those requests."""
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()
        """Keys of blocks that it computed, least recently used first."""

    def __len__(self) -> int:
        """Blocks that it is known to hold."""
        return len(self._held)

    def held_tokens(self, keys: Sequence[bytes]) -> int:
        """Tokens of a prompt that it holds. keys: of the prompt's full blocks, in order."""
        blocks = 0
        for key in keys:
            if key not in self._held:
                break
            blocks += 1
        return blocks * self._block_size

    def hold(self, keys: Sequence[bytes]) -> None:
        """A prompt is computed there."""
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)


class Chooser:
    def __init__(self, policy: RouterPolicy) -> None:
        self._policy = policy
        self._last = -1

    @property
    def reads_prefixes(self) -> bool:
        return self._policy == "kv"

    def choose(self, places: Sequence[Place], keys: Sequence[bytes], prompt_tokens: int) -> Place:
        """
        Args:
            places: at least one, in the order of their numbers.
            keys: of the prompt's full blocks, in order; empty where prefixes are not looked at.
        """
        if self._policy == "round-robin":
            found = next((place for place in places if place.number > self._last), places[0])
        else:
            found = min(places, key=lambda place: self._cost(place, keys, prompt_tokens))
        self._last = found.number
        return found

    def _cost(self, place: Place, keys: Sequence[bytes], prompt_tokens: int) -> tuple[int, int, bool, int]:
        left = prompt_tokens - (place.held_tokens(keys) if keys else 0)
        return place.work + left, place.rows, place.number <= self._last, place.number


def cost_of(prompt_tokens: int, max_tokens: int | None, sequences: int) -> int:
    """Work of a request in prompt tokens.

    Args:
        prompt_tokens: those that must be computed.
        max_tokens: of each sequence; None: as many as fit.
    """
    expected = EXPECTED_TOKENS if max_tokens is None else min(max_tokens, EXPECTED_TOKENS)
    return prompt_tokens + DECODE_COST * expected * sequences
