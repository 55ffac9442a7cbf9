"""Bearer keys. The gate stands before the router: what is not an open path needs a key, whether it exists or not."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence

from troupellm.protocol.api.caller import NOBODY, Caller
from troupellm.protocol.errors import ConfigError
from troupellm.server.base.errors import unauthorized

_NO_KEY = bytes(32)
"""The digest that an unknown key is compared with."""
ADMIN = Caller("admin", "admin")
"""The caller of an admin route, in the log."""


def as_keys(keys: str | Iterable[str] | None) -> tuple[str, ...]:
    """Keys in any form that they are given in: one text is one key, never a sequence of one-letter keys.

    Raises:
        ConfigError: an empty key, which would guard nothing, one that is no text, or one that no header can hold.
    """
    given = () if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
    if not all(isinstance(key, str) and key.strip() for key in given):
        raise ConfigError("api_key: a key must be a text that is not empty", param="api_key")
    if not all(key == key.strip() and key.isprintable() for key in given):
        raise ConfigError("api_key: a key must be printable, without spaces around it", param="api_key")
    return given


def digest_of(key: str) -> bytes:
    """The digest that is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def named(name: str) -> Caller:
    """The owner of this name in a key file: the same after the key was replaced."""
    return Caller(name, f"name:{name}")


def admin_keys(keys: str | Iterable[str] | None) -> dict[bytes, Caller]:
    """Digests of keys for the admin routes, all of one caller.

    Raises:
        ConfigError: an empty key.
    """
    try:
        return dict.fromkeys(map(digest_of, as_keys(keys)), ADMIN)
    except ConfigError as error:
        raise ConfigError(f"admin_{error.message}", param="admin_api_key") from None


def anonymous_keys(keys: str | Iterable[str] | None) -> dict[bytes, Caller]:
    """Digests of keys without names, and who has them: `key-1`, `key-2` in their order.

    Raises:
        ConfigError: see `as_keys`.
    """
    callers: dict[bytes, Caller] = {}
    for number, key in enumerate(as_keys(keys), start=1):
        digest = digest_of(key)
        owner = hashlib.sha256(b"owner\0" + digest).hexdigest()
        callers.setdefault(digest, Caller(f"key-{number}", f"key:{owner}"))
    return callers


def owners_of(callers: Mapping[bytes, Caller]) -> dict[str, str]:
    """The owners that there are, and the names that they have now; without keys it is `NOBODY`."""
    return {caller.owner: caller.name for caller in callers.values() or (NOBODY,)}


class Gate:
    """Knows keys by their digests only.

    A lookup compares digests under a secret of this process, so its time reveals nothing about a key.
    """

    def __init__(self, keys: str | Iterable[str] | Mapping[bytes, Caller] | None, open_paths: frozenset[bytes]) -> None:
        """keys: as texts, or SHA-256 digest to who has it; none opens everything.

        Raises:
            ConfigError: see `as_keys`.
        """
        callers = keys if isinstance(keys, Mapping) else anonymous_keys(keys)
        self.owners = owners_of(callers)
        """Of what outlives a request, and the names that they have now."""
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, tuple[bytes, Caller | None]] = {
            self._blind(digest): (digest, caller) for digest, caller in callers.items()
        }
        self._open_paths = open_paths

    def check(self, raw_path: bytes, authorization: Sequence[bytes], api_key: Sequence[bytes] = ()) -> Caller:
        """Let a request through, or refuse it.

        Args:
            raw_path: the path exactly as sent, still percent-encoded: no other spelling of an open path is open.
            authorization: every Authorization header of the request.
            api_key: every X-Api-Key header, where Anthropic's clients send the key; with both, both must be right.

        Returns:
            the owner of its key; `NOBODY` where no key is needed.

        Raises:
            HttpError: 401, the same for a missing and for a wrong key.
        """
        if not self._callers or raw_path in self._open_paths:
            return NOBODY
        if len(authorization) > 1 or len(api_key) > 1:
            raise unauthorized()
        callers = {self._caller_of(key.strip()) for key in (*map(_bearer, authorization), *api_key)}
        caller = callers.pop() if len(callers) == 1 else None
        if caller is None:
            raise unauthorized()
        return caller

    def _caller_of(self, key: bytes) -> Caller | None:
        """Takes the same time for every key of the same length."""
        digest = hashlib.sha256(key).digest()
        known, caller = self._callers.get(self._blind(digest), (_NO_KEY, None))
        return caller if hmac.compare_digest(known, digest) and key else None

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _bearer(authorization: bytes) -> bytes:
    scheme, _, credentials = authorization.partition(b" ")
    return credentials if scheme.lower() == b"bearer" else b""
