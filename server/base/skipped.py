"""Parts of a request that the model does not get as they were sent.

A header of the answer names them, and the log each kind once. Coding agents always send tools that their vendor's own
server runs, and leave their traces in conversations. They work without them, so these are no reason to refuse a
request; but a user must be able to see where a missing one went.
"""

import logging
import re
from collections.abc import Iterable, Sequence

from troupellm.server.base.exchange import Exchange

logger = logging.getLogger("troupellm.server")

HEADER = b"x-troupellm-skipped"
MAX_NAMED = 16
MAX_REMEMBERED = 64
_ODD = re.compile(r"[^A-Za-z0-9_.-]")
_MOST_LETTERS = 64
_PLAIN = re.compile(r"[a-z]+ [a-z][a-z0-9_]{0,39}")
"""Names that are logged; other ones are the client's own text and go to the client alone."""


def skipped_names(what: str, kinds: Iterable[str]) -> list[str]:
    """The names of skipped things, each kind once; all of them may stand in a header.

    Args:
        what: one word for them, such as `tool`.
        kinds: their types, as the client has written them.
    """
    return list(dict.fromkeys(f"{what} {_ODD.sub('?', kind[:_MOST_LETTERS]) or '?'}" for kind in kinds))


class Skipped:
    """Logs each such name once, for the first 64 of them."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def report(self, exchange: Exchange, names: Sequence[str]) -> None:
        """Add names of `skipped_names` to the answer's header, before the answer begins."""
        names = list(dict.fromkeys([*exchange.skipped, *names]))
        if len(names) == len(exchange.skipped):
            return
        exchange.skipped = names
        more = len(names) - MAX_NAMED
        shown = [*names[:MAX_NAMED], f"{more} more"] if more > 0 else names
        others = [header for header in exchange.further_headers if header[0] != HEADER]
        exchange.further_headers = (*others, (HEADER, ", ".join(shown).encode()))
        for name in names[:MAX_REMEMBERED]:
            if name in self._logged or len(self._logged) >= MAX_REMEMBERED:
                continue
            if _PLAIN.fullmatch(name):
                self._logged.add(name)
                logger.warning("requests have the %s, which the model does not get as it was sent", name)
