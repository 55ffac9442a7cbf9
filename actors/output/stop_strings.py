"""Stop strings, found as the text arrives (an Aho-Corasick automaton).

Each character is looked at once, so the cost does not depend on the length of the text, and what is found does not
depend on how the text was cut into tokens: the match that ends first wins, the longest of those that end together.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Immutable; shared by all sequences of a request. State 0 is "nothing begun"."""

    __slots__ = ("_fail", "_found", "_goto", "depth", "first")

    def __init__(self, strings: Sequence[str]) -> None:
        self.first = frozenset(string[0] for string in strings)
        self.depth = [0]
        """By state: how many of the last characters may be the beginning of a stop string."""
        self._goto: list[dict[str, int]] = [{}]
        self._found: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._fail = [0] * len(self._goto)
        self._link()

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read on from a state.

        Returns:
            The new state, how many characters were read, and the stop string that ends there, if one does.
        """
        if state == 0 and self.first.isdisjoint(text):
            return 0, len(text), None
        goto, fail, found = self._goto, self._fail, self._found
        for position, character in enumerate(text):
            following = goto[state].get(character)
            while following is None and state:
                state = fail[state]
                following = goto[state].get(character)
            state = following or 0
            if found[state] is not None:
                return state, position + 1, found[state]
        return state, len(text), None

    def _add(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, 1):
            following = self._goto[state].get(character)
            if following is None:
                following = len(self._goto)
                self._goto[state][character] = following
                self._goto.append({})
                self._found.append(None)
                self.depth.append(depth)
            state = following
        self._found[state] = string

    def _link(self) -> None:
        """Breadth first: where to go on when a character does not fit, and which shorter strings end there too."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            if self._found[state] is None:
                self._found[state] = self._found[self._fail[state]]
            for character, following in self._goto[state].items():
                queue.append(following)
                back = self._fail[state]
                while back and character not in self._goto[back]:
                    back = self._fail[back]
                self._fail[following] = self._goto[back].get(character, 0)
