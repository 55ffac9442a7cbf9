"""Lists of layers in a checkpoint's configuration: exact names, patterns behind `re:`, shell wildcards.

The patterns are untrusted, and Python's matcher has no time limit, so patterns that could take long are refused. These
have a repeat of a group that holds a repeat or a choice, or many repeats (optional parts included). Many choices are
refused too: they multiply with each other and with the repeats behind them.
"""

import re
from collections.abc import Iterable
from fnmatch import translate

from troupellm.protocol.errors import ModelLoadError

EXPRESSION = "re:"
MOST_CHARACTERS = 512
MOST_REPEATS = 5
MOST_WAYS = 2**18
"""Number of paths through all choices and repeats of a pattern, multiplied with each other."""
REPEAT_WAYS = 8
"""Factor of a repeat that begins behind a certain letter, or of an optional part."""
CLOSE_REPEAT_WAYS = 64
"""Factor of a repeat that may begin anywhere in the one before it."""
MOST_PATTERNS = 4096
_HARMLESS = ("(?:", "(?=", "(?!", "(?i:")


class Names:
    """Layers that a list names."""

    def __init__(self, entries: Iterable[str], where: str, *, wildcards: bool = False) -> None:
        """
        Args:
            where: file and key, for messages.
            wildcards: `*`, `?` and `[...]` stand for any text, any character, any of some, as in a shell.

        Raises:
            ModelLoadError: a pattern that is none, or that could take long.
        """
        self._exact: set[str] = set()
        self._patterns: list[re.Pattern[str]] = []
        for entry in entries:
            if entry.startswith(EXPRESSION):
                self._patterns.append(safe_pattern(entry.removeprefix(EXPRESSION), where))
            elif wildcards and any(mark in entry for mark in "*?["):
                if len(entry) > MOST_CHARACTERS:
                    raise ModelLoadError(f"{where}: {entry[:40]!r}... is longer than {MOST_CHARACTERS} characters")
                self._patterns.append(re.compile(translate(entry)))
            else:
                self._exact.add(entry)
        if len(self._patterns) > MOST_PATTERNS:
            raise ModelLoadError(f"{where} has {len(self._patterns)} patterns; at most {MOST_PATTERNS} are read")

    def __contains__(self, name: str) -> bool:
        return name in self._exact or any(pattern.match(name) for pattern in self._patterns)

    def exactly(self, name: str) -> bool:
        """True if the name itself is in the list."""
        return name in self._exact


def safe_pattern(text: str, where: str) -> re.Pattern[str]:
    """
    Raises:
        ModelLoadError: no regular expression, or one that could take long.
    """
    if len(text) > MOST_CHARACTERS or not _is_quick(text):
        raise ModelLoadError(f"{where}: the pattern {text[:80]!r} could take too long to match")
    try:
        return re.compile(text)
    except re.error as error:
        raise ModelLoadError(f"{where}: {text[:80]!r} is no regular expression: {error}") from None


def _is_quick(text: str) -> bool:
    """True if the matching time grows with a small power of the name's length."""
    bare = re.sub(r"\\(.)", lambda found: "." if found[1].isalnum() else "x", text)
    bare = re.sub(r"\[\^?\]?[^\]]*\]", ".", bare).replace("(?i:", "(?:")
    bare = re.sub(r"\{\d*(,?)\d*\}", r"{\1}", bare)
    groups, choices, ways, closed, repeats, apart = [False], [1], 1, False, 0, True
    for index, character in enumerate(bare):
        optional = character == "?" and bare[index - 1 : index] != "("
        repeating = optional or character in "*+{"
        if repeating and index and bare[index - 1] in "*+?}":
            continue  # it only sets how greedy the repeat before it is
        if character == "(":
            if bare[index : index + 2] == "(?" and not bare[index:].startswith(_HARMLESS):
                return False
            groups.append(False)
            choices.append(1)
        elif character == ")" and len(groups) > 1:
            closed = groups.pop()
            groups[-1] = groups[-1] or closed
            ways *= choices.pop()
        elif character == "|":
            groups[-1] = True
            choices[-1] += 1
        elif repeating:
            if bare[index - 1 : index] == ")" and closed and not optional:
                return False
            if character != "{" or "," in bare[index:].partition("}")[0]:
                groups[-1], repeats = True, repeats + 1
                ways *= REPEAT_WAYS if optional or apart else CLOSE_REPEAT_WAYS
                apart = False
        if character in "|)":  # what stood before need not be on the way
            apart = False
        elif character.isalnum() or character == "_":
            apart = True
    return repeats <= MOST_REPEATS and ways * choices[0] <= MOST_WAYS
