"""Who asks."""

import msgspec


class Caller(msgspec.Struct, frozen=True):
    """Whoever has an API key, as everything behind the gate knows them."""

    name: str = ""
    """In logs, metrics and limits. Keys without names are numbered in the order they are given: theirs may be another
    key's after the next start."""
    owner: str = ""
    """What outlives a request is found by it, and no other caller ever has it: the name that a key file gives, whatever
    key stands beside it, or a digest of a key that has no name."""


NOBODY = Caller()
"""Where no keys are checked: everything belongs to everybody."""
