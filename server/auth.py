"""Bearer keys. The gate stands before the router: what is not an open path needs a key, whether it exists or not."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence

from troupellm.protocol.errors import ConfigError
from troupellm.server.errors import unauthorized

_NOBODY = bytes(32)
"""What the digest of a key that nobody has is compared with."""
ADMIN = "admin"
"""Name of whoever uses an admin route, in the log."""


def as_keys(keys: str | Iterable[str] | None) -> tuple[str, ...]:
    """Keys in any form that they are given in: one text is one key, never a sequence of one-letter keys.

    Raises:
        ConfigError: an empty key, which would guard nothing, or one that is no text.
    """
    given = () if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
    if not all(isinstance(key, str) and key.strip() for key in given):
        raise ConfigError("api_key: a key must be a text that is not empty", param="api_key")
    return given


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def admin_keys(keys: str | Iterable[str] | None) -> dict[bytes, str]:
    """Digests of keys for the admin routes, all of one name.

    Raises:
        ConfigError: an empty key.
    """
    try:
        return dict.fromkeys(map(digest_of, as_keys(keys)), ADMIN)
    except ConfigError:
        raise ConfigError("admin_api_key: a key must be a text that is not empty", param="admin_api_key") from None


def anonymous_keys(keys: str | Iterable[str] | None) -> dict[bytes, str]:
    """Digests of keys without names, and the names that they get: `key-1`, `key-2` in their order.

    Raises:
        ConfigError: see `as_keys`.
    """
    named: dict[bytes, str] = {}
    for number, key in enumerate(as_keys(keys), start=1):
        named.setdefault(digest_of(key), f"key-{number}")
    return named


class Gate:
    """Knows keys by their digests only.

    What is looked up is a digest under a secret of this process, so the time that it takes tells nothing about a key.
    """

    def __init__(self, keys: str | Iterable[str] | Mapping[bytes, str] | None, open_paths: frozenset[bytes]) -> None:
        """keys: as texts, or SHA-256 digest to name; none opens everything.

        Raises:
            ConfigError: see `as_keys`.
        """
        named = keys if isinstance(keys, Mapping) else anonymous_keys(keys)
        self._secret = secrets.token_bytes(32)
        self._names: dict[bytes, tuple[bytes, str | None]] = {
            self._blind(digest): (digest, name) for digest, name in named.items()
        }
        self._open_paths = open_paths

    def check(self, raw_path: bytes, authorization: Sequence[bytes], api_key: Sequence[bytes] = ()) -> str:
        """Let a request through, or refuse it.

        Args:
            raw_path: the path exactly as sent, still percent-encoded: no other spelling of an open path is open.
            authorization: every Authorization header of the request.
            api_key: every X-Api-Key header, where Anthropic's clients send the key; with both, both must be right.

        Returns:
            the name of its key; "" where none is needed.

        Raises:
            HttpError: 401, the same for a missing and for a wrong key.
        """
        if not self._names or raw_path in self._open_paths:
            return ""
        if len(authorization) > 1 or len(api_key) > 1:
            raise unauthorized()
        names = {self._name_of(key.strip()) for key in (*map(_bearer, authorization), *api_key)}
        name = names.pop() if len(names) == 1 else None
        if name is None:
            raise unauthorized()
        return name

    def _name_of(self, key: bytes) -> str | None:
        """Takes the same time for every key of the same length."""
        digest = hashlib.sha256(key).digest()
        known, name = self._names.get(self._blind(digest), (_NOBODY, None))
        return name if hmac.compare_digest(known, digest) and key else None

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _bearer(authorization: bytes) -> bytes:
    scheme, _, credentials = authorization.partition(b" ")
    return credentials if scheme.lower() == b"bearer" else b""
