"""Fields that clients send and this server does not know: ignored, but those that look like sampling are logged."""

import logging
import re
from typing import Any

import msgspec

logger = logging.getLogger("troupellm.server")

MAX_REMEMBERED = 64
_PLAIN = re.compile(r"[a-z][a-z0-9_]{0,39}")
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
            if body[name] is not None and _PLAIN.fullmatch(name) and _SAMPLING.search(name):
                self._logged.add(name)
                logger.warning("requests have a field %s, which this server does not know and ignores", name)
