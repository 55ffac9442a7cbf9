"""The key file: who may come in, under which name, and what each may use.

    [[keys]]
    name = "alice"                  # in logs and metrics; the key itself is nowhere
    key = "a-long-random-text"      # without spaces; or: sha256 = "its SHA-256 in hex"
    requests_per_minute = 60        # these and the rest are optional
    tokens_per_minute = 100000
    max_concurrency = 8
    weight = 2.0
    priority = 0
    models = ["base", "sql-*"]      # that it may name; others are not found

Keys are kept as digests from here on, and no error repeats anything of a key.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from troupellm.protocol.api.caller import Caller
from troupellm.protocol.config.engine import EngineConfig, ServerConfig, TenantConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.access.auth import anonymous_keys, digest_of, named

MAX_KEYS = 1024
"""Names in the file; each is a label in the metrics."""
_PARAM = "api_key_file"
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class _Entry(TenantConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str | None = None
    sha256: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...]


class Keys(msgspec.Struct, frozen=True):
    """Everybody who may come in."""

    callers: dict[bytes, Caller]
    """SHA-256 of a key to who has it."""
    tenants: tuple[TenantConfig, ...]


def read_keys(config: ServerConfig) -> Keys:
    """The keys of the file and those without names, which have no limits.

    Raises:
        ConfigError: the file cannot be read or says something wrong, or a key is empty.
    """
    callers: dict[bytes, Caller] = {}
    tenants: list[TenantConfig] = []
    for number, entry in enumerate(_entries(config.api_key_file), start=1):
        digest = _digest(entry, number)
        if digest in callers:
            raise _wrong(f"keys {number} ({entry.name}) and {callers[digest].name} are the same")
        caller = named(entry.name)
        if caller in callers.values():
            raise _wrong(f"two keys have the name {entry.name}")
        callers[digest] = caller
        tenants.append(_tenant(entry))
    anonymous = {digest: caller for digest, caller in anonymous_keys(config.api_key).items() if digest not in callers}
    numbered = [caller.name for caller in anonymous.values()]
    if taken := set(numbered) & {caller.name for caller in callers.values()}:
        raise _wrong(f"the name {min(taken)} is that of a key without a name; take another one")
    if len(callers) + len(anonymous) > 1:
        tenants += [TenantConfig(name=name) for name in numbered]
    return Keys(callers | anonymous, tuple(tenants))


def with_tenants(engine: EngineConfig, tenants: tuple[TenantConfig, ...]) -> EngineConfig:
    """The engine's configuration with these beside the tenants that it knows already."""
    given = {tenant.name for tenant in tenants}
    known = tuple(tenant for tenant in engine.scheduler.tenants if tenant.name not in given)
    scheduler = msgspec.structs.replace(engine.scheduler, tenants=known + tenants)
    return msgspec.structs.replace(engine, scheduler=scheduler)


def require_limits(tenants: tuple[TenantConfig, ...], engine: EngineConfig) -> None:
    """Nothing of the file may be ignored silently by an engine that was made without it.

    Raises:
        ConfigError: the file has a limit that the engine does not enforce.
    """
    known = {tenant.name: tenant for tenant in engine.scheduler.tenants}
    for tenant in tenants:
        if known.get(tenant.name, TenantConfig(name=tenant.name)) != tenant:
            raise _wrong(f"the engine does not have the limits of {tenant.name}; name them in its setting tenants")


def _entries(path: str | None) -> tuple[_Entry, ...]:
    if path is None:
        return ()
    try:
        content: Mapping[str, object] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        entries = msgspec.convert(content, _File).keys
    except OSError as error:
        raise _wrong(f"cannot be read: {error.strerror or 'input/output error'}") from None
    except UnicodeDecodeError:
        raise _wrong("is no UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at (line \d+, column \d+|end of document)", str(error))
        raise _wrong(f"is no TOML{f' ({place.group(1)})' if place else ''}") from None
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from None
    if not entries:
        raise _wrong("has no keys: it would lock everybody out")
    if len(entries) > MAX_KEYS:
        raise _wrong(f"has {len(entries)} keys; at most {MAX_KEYS} are allowed")
    return entries


def _digest(entry: _Entry, number: int) -> bytes:
    if (entry.key is None) == (entry.sha256 is None):
        raise _wrong(f"key {number} ({entry.name}) needs either key or sha256")
    if entry.key is not None:
        if not _KEY.fullmatch(entry.key):
            raise _wrong(f"key {number} ({entry.name}): key must be 1 to 512 printable ASCII characters without spaces")
        return digest_of(entry.key)
    if entry.sha256 is None or not _DIGEST.fullmatch(entry.sha256):
        raise _wrong(f"key {number} ({entry.name}): sha256 must be 64 hexadecimal digits")
    return bytes.fromhex(entry.sha256)


def _tenant(entry: _Entry) -> TenantConfig:
    return TenantConfig(**{name: getattr(entry, name) for name in TenantConfig.__struct_fields__})


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"{_PARAM}: {text}", param=_PARAM)
