"""`kv_transfer_config`: stores of KV blocks that several engines share, under vLLM's keys."""

from typing import Any, Literal

import msgspec

from troupellm.protocol.config.allowed_values import with_allowed_values
from troupellm.protocol.errors import ConfigError

FIELD = "kv_transfer_config"
Role = Literal["kv_producer", "kv_consumer", "kv_both"]
FailurePolicy = Literal["recompute", "fail"]
MOST_CONNECTORS = 8

_ELSEWHERE = {
    "engine_id": "engines tell each other's blocks apart by their keys",
    "kv_buffer_device": "blocks go through host memory; see kv_offloading_size",
    "kv_buffer_size": "see bytes in kv_connector_extra_config, and kv_offloading_size",
    "kv_rank": "there are no ranks: give addresses in kv_connector_extra_config",
    "kv_parallel_size": "there are no ranks: give addresses in kv_connector_extra_config",
    "kv_ip": "give listen or peers in kv_connector_extra_config",
    "kv_port": "give listen or peers in kv_connector_extra_config",
    "kv_connector_module_path": "install the connector under the entry point group troupellm.connectors",
    "enable_permute_local_kv": "blocks are handed over as they lie in the cache",
}
"""Keys that vLLM has and we do not, and what to do instead."""


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One connector."""

    kv_connector: str
    """shared-directory, tcp-peer, or the name of a plug-in."""
    kv_role: Role = "kv_both"
    """Whether this engine puts blocks there, takes blocks from there, or both."""
    kv_load_failure_policy: FailurePolicy = "recompute"
    """The reaction to blocks that the connector announced and did not deliver: they are computed, or the
    request fails."""
    kv_connector_extra_config: dict[str, Any] = {}
    """The connector's own settings."""

    def __post_init__(self) -> None:
        if self.kv_load_failure_policy == "fail" and not self.consumes:
            raise ValueError("kv_load_failure_policy fail is of no use to a kv_producer, which loads nothing")

    @property
    def produces(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        return self.kv_role != "kv_producer"


def read_transfer_configs(given: dict[str, Any] | list[dict[str, Any]] | str | None) -> tuple[KVTransferConfig, ...]:
    """One connector, or a list of them, nearest first; as an object or as its JSON.

    Raises:
        ConfigError: an unknown key, or a value of another type; `param` names it.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given.encode())
        except msgspec.DecodeError as error:
            raise ConfigError(f"{FIELD} is no JSON: {error}", param=FIELD) from None
    listed = given if isinstance(given, list) else [given]
    if len(listed) > MOST_CONNECTORS:
        raise ConfigError(f"{FIELD}: {len(listed)} connectors; at most {MOST_CONNECTORS} are possible", param=FIELD)
    return tuple(map(_read, listed))


def _read(given: Any) -> KVTransferConfig:
    if isinstance(given, dict):
        for key, instead in _ELSEWHERE.items():
            if key in given:
                raise ConfigError(f"{FIELD}.{key} is not supported: {instead}", param=f"{FIELD}.{key}")
        for key in given:
            if key not in KVTransferConfig.__struct_fields__:
                known = ", ".join(KVTransferConfig.__struct_fields__)
                raise ConfigError(f"{FIELD}.{key} is unknown; there are {known}", param=f"{FIELD}.{key}")
    try:
        return msgspec.convert(given, KVTransferConfig)
    except msgspec.ValidationError as error:
        text, _, path = with_allowed_values(error, KVTransferConfig).partition(" - at `$")
        param = FIELD + path.rstrip("`")
        raise ConfigError(f"{param}: {text}", param=param) from None
