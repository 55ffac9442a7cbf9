"""A planted fault: one change of the product that the quick tests of its room must notice."""

from typing import NamedTuple


class Mutant(NamedTuple):
    fault: str
    """The wrong behaviour, in one sentence; the mutant's name."""
    file: str
    """Under the root of the repository."""
    right: str
    """Occurs once in the file."""
    wrong: str
    """Replaces `right`."""
    tests: str
    """The smallest quick test files that should fail, under tests/."""
