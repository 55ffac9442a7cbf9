"""The owner of a request."""

import msgspec


class Caller(msgspec.Struct, frozen=True):
    """The holder of an API key, as all code behind the key check sees it."""

    name: str = ""
    """In logs, metrics and limits. Keys without names are numbered in the order they are given: theirs may be another
    key's after the next start."""
    owner: str = ""
    """Stored objects are found by it, and no other caller ever has it: the name in the key file, also after its key was
    replaced, or a digest of a key without a name."""


NOBODY = Caller()
"""Where no keys are checked: everything belongs to everybody."""
