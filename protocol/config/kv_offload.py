"""Settings of KV offload: where blocks go that leave the device, and how they come back."""

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.config.kv_connectors import read_transfer_configs
from troupellm.protocol.config.setting_types import Count, PositiveInt, help_text as _help
from troupellm.protocol.config.sizes import human_int
from troupellm.protocol.errors import ConfigError

GIB = 2**30
DISK_BYTES = 16 * GIB
TIMEOUT = 5.0
POLICY = "lru"
HOST_TIER = 0
"""Tier 0 is host memory; what lies further out is numbered from 1."""


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers of KV blocks behind the device: host memory, then disk, then the stores of connectors.

    Raises:
        ConfigError: (a ValueError) settings that do not go together; `param` names the one at fault.
    """

    kv_offloading_size: Annotated[
        float | str | None,
        _help("host memory for KV blocks that leave the device: GiB, or a human size such as 512MiB (default: none)"),
    ] = None
    kv_offloading_backend: Annotated[Literal["native"], _help("who moves KV blocks; there is one")] = "native"
    kv_offload_disk_path: Annotated[
        str | None, _help("folder for KV blocks that leave host memory; they survive a restart (default: none)")
    ] = None
    kv_offload_disk_bytes: Annotated[PositiveInt, _help("most bytes of KV blocks in that folder")] = DISK_BYTES
    kv_offload_timeout: Annotated[
        float,
        Meta(
            gt=0.0,
            le=600.0,
            description="seconds that disk or a connector may take for one block; the tier is left alone after that. "
            "A request waits no longer for all its blocks together, and what computing them takes; of a connector with "
            "the load failure policy fail, for each block",
        ),
    ] = TIMEOUT
    kv_offload_policy: Annotated[
        str, _help("which blocks leave host memory first: lru, arc, or the name of a plug-in")
    ] = POLICY
    kv_offload_store_threshold: Annotated[
        Count, _help("uses of a KV block before it is copied to host memory; 0: as soon as it is full")
    ] = 0
    preemption_mode: Annotated[
        Literal["auto", "recompute", "offload"],
        _help("what becomes of a preempted sequence's KV blocks; auto: whichever brings them back sooner, as measured"),
    ] = "auto"
    kv_transfer_config: Annotated[
        dict[str, Any] | list[dict[str, Any]] | str | None,
        _help("JSON: kv_connector (shared-directory, tcp-peer or a plug-in), kv_role and more; or a list of such"),
    ] = None

    def __post_init__(self) -> None:
        if self.kv_offloading_size is not None:
            self._host_bytes()
        connectors = read_transfer_configs(self.kv_transfer_config)
        if self.kv_offload_disk_path is None and self.kv_offload_disk_bytes != DISK_BYTES:
            raise ConfigError(
                "kv_offload_disk_bytes needs kv_offload_disk_path: there is no folder that it could be a limit of",
                param="kv_offload_disk_bytes",
            )
        if self.on:
            return
        if connectors:
            raise ConfigError(
                "kv_transfer_config needs kv_offloading_size: blocks go to connectors through host memory",
                param="kv_transfer_config",
            )
        if self.kv_offload_disk_path is not None:
            raise ConfigError(
                "kv_offload_disk_path needs kv_offloading_size: blocks go to disk through host memory",
                param="kv_offload_disk_path",
            )
        if self.preemption_mode == "offload":
            raise ConfigError(
                "preemption_mode offload needs kv_offloading_size: there is nowhere to offload to",
                param="preemption_mode",
            )
        for name, default in _OF_NO_USE_ALONE.items():
            if getattr(self, name) != default:
                raise ConfigError(f"{name} needs kv_offloading_size: without it no KV block is offloaded", param=name)

    @property
    def on(self) -> bool:
        """Whether there is host memory for blocks."""
        return self.host_bytes > 0

    @property
    def host_bytes(self) -> int:
        """Of the host tier; 0 is none."""
        return 0 if self.kv_offloading_size is None else self._host_bytes()

    def _host_bytes(self) -> int:
        given = self.kv_offloading_size
        try:
            if isinstance(given, str):
                try:
                    gib = float(given)  # a bare number is GiB, as in vLLM
                except ValueError:
                    size = human_int(given)
                else:
                    size = int(gib * GIB) if math.isfinite(gib) else -1
            else:
                size = int((given or 0.0) * GIB) if math.isfinite(given or 0.0) else -1
        except ValueError:
            size = -1
        if not 0 <= size <= 2**50:
            raise ConfigError(
                f"kv_offloading_size: {given!r} is no size; give GiB (0 to 1048576) or a human size such as 512MiB",
                param="kv_offloading_size",
            )
        return size


_OF_NO_USE_ALONE = {
    "kv_offload_timeout": TIMEOUT,
    "kv_offload_policy": POLICY,
    "kv_offload_store_threshold": 0,
}
"""Settings that `kv_offloading_size` turns on, and their defaults."""
