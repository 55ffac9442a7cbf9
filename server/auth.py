"""Bearer keys. The gate stands before the router: what is not an open path needs a key, whether it exists or not."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from troupellm.protocol.errors import ConfigError
from troupellm.server.errors import unauthorized


def as_keys(keys: str | Iterable[str] | None) -> tuple[str, ...]:
    """Keys in any form that they are given in: one text is one key, never a sequence of one-letter keys.

    Raises:
        ConfigError: an empty key, which would guard nothing, or one that is no text.
    """
    given = () if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
    if not all(isinstance(key, str) and key.strip() for key in given):
        raise ConfigError("api_key: a key must be a text that is not empty", param="api_key")
    return given


class Gate:
    """Compares digests in constant time, against every key, so neither length nor order of the keys shows."""

    def __init__(self, keys: str | Iterable[str] | None, open_paths: frozenset[bytes]) -> None:
        """
        Raises:
            ConfigError: see `as_keys`.
        """
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in as_keys(keys))
        self._open_paths = open_paths

    def check(self, raw_path: bytes, authorization: Sequence[bytes]) -> None:
        """Let a request through or refuse it.

        Args:
            raw_path: the path exactly as sent, still percent-encoded: no other spelling of an open path is open.
            authorization: every Authorization header of the request.

        Raises:
            HttpError: 401, the same for a missing and for a wrong key.
        """
        if not self._digests or raw_path in self._open_paths:
            return
        if len(authorization) != 1:
            raise unauthorized()
        scheme, _, credentials = authorization[0].partition(b" ")
        credentials = credentials.strip()
        given = hashlib.sha256(credentials).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not credentials or not any(matches):
            raise unauthorized()
