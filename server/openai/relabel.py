"""Errors of the chat turn in the words of an API that is translated to it."""

import re
from collections.abc import Iterable

from troupellm.protocol.errors import InvalidRequest, TroupeError
from troupellm.server.base.exchange import Exchange

Names = Iterable[tuple[str, str]]
"""The chat API's name of a field, and this API's; the first that fits is taken."""


def relabel(error: TroupeError, names: Names) -> TroupeError:
    """The same error, of the field that the client has sent."""
    if not isinstance(error, InvalidRequest) or error.param is None:
        return error
    for theirs, ours in names:
        rest = error.param[len(theirs) :]
        if error.param.startswith(theirs) and rest[:1] in ("", ".", "["):
            error.message = ours.join(_field(theirs).split(error.message))
            error.args = (error.message,)
            error.param = ours + rest
            break
    return error


def _field(name: str) -> re.Pattern[str]:
    """Where a text names a field. Names that are English words too do so where a sentence begins, or with a path."""
    whole = rf"(?<![\w.]){re.escape(name)}(?!\w)"
    return re.compile(rf"(?:^|(?<=: )){re.escape(name)}(?!\w)|{whole}(?=\[|\.\w)" if name.isalpha() else whole)


def relabelled(exchange: Exchange, error: TroupeError, names: Names) -> TroupeError:
    """The same for an error that ends an exchange, which no other names are put into then."""
    exchange.renames = {}
    return relabel(error, names)
