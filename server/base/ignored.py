"""Parts of a request that the model does not get as they were sent, and fields that this server does not know.

A header of the answer names the former, and the log each kind once. Coding agents always send tools that their vendor's
own server runs, and leave their traces in conversations. They work without them, so these are no reason to refuse a
request; but a user must be able to see where a missing one went. Of unknown fields those that look like sampling are
logged.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

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


_FIELD = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names that may stand in a log line; also bounds the memory of them."""
_SAMPLING = re.compile(
    r"penalty|temperature|sampl|logit|logprob|mirostat|dry_|xtc_|dynatemp|smoothing|typical|cutoff|ngram|beam|guided|grammar|n_predict"
    r"|token|stop|seed|^(top|min|max)_|_p$"
)


class UnknownFields:
    """Logs each such field once, for the first 64 names."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def report(self, body: Any, kind: type[msgspec.Struct]) -> None:
        """Look at a decoded body that is about to become a `kind`."""
        if not isinstance(body, dict):
            return
        for name in body.keys() - kind.__struct_fields__:
            if name in self._logged or len(self._logged) >= MAX_REMEMBERED:
                continue
            if body[name] is not None and _FIELD.fullmatch(name) and _SAMPLING.search(name):
                self._logged.add(name)
                logger.warning("requests have a field %s, which this server does not know and ignores", name)
