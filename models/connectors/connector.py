"""What a connector is: a `BlockStore` that other engines reach too, made from its part of `kv_transfer_config`.

A plug-in is a callable under the entry point group `troupellm.connectors` that takes a `ConnectorContext` and gives a
`BlockStore`. Its name is what `kv_connector` says. What the store gives back must be authenticated by the plug-in: a
wrong block is a wrong answer. `context.seal` does that for blocks kept as bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from troupellm.models.connectors.seal import Seal
from troupellm.models.offload.store import BlockStore, StoreContext
from troupellm.models.prefix_secret import derived_key
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.kv_transfer import FIELD, KVTransferConfig
from troupellm.protocol.sizes import human_int

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
_OPTIONS = f"{FIELD}.kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is made from."""

    config: KVTransferConfig
    store: StoreContext
    secret: bytes
    """Shared by the engines that share blocks; 32 bytes."""

    def key(self, purpose: str) -> bytes:
        """A key of the connector's own, which follows from the secret."""
        return derived_key(self.secret, f"{self.config.kv_connector} {purpose}")

    @property
    def seal(self) -> Seal:
        """Of blocks that leave the engine; the same for all connectors, so that a block may pass through several."""
        key = derived_key(self.secret, "sealed KV blocks")
        return Seal(key, self.store.fingerprint, self.store.block_bytes)

    def options(self, kind: type[OptionsT]) -> OptionsT:
        """`kv_connector_extra_config` as a Struct, which should forbid unknown fields.

        Raises:
            ConfigError: a field is unknown, missing, or of another type.
        """
        try:
            return msgspec.convert(self.config.kv_connector_extra_config, kind)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$")
            param = _OPTIONS + path.rstrip("`")
            raise ConfigError(f"{self.config.kv_connector}: {param}: {text}", param=param) from None

    def refuse(self, option: str, wanted: str) -> ConfigError:
        """The error for an option with a wrong value."""
        param = f"{_OPTIONS}.{option}"
        return ConfigError(f"{self.config.kv_connector}: {param} {wanted}", param=param)

    def size(self, option: str, given: int | str) -> int:
        """Bytes that an option says, as a number or a human size; at least one sealed block.

        Raises:
            ConfigError: it is no size, or too little.
        """
        try:
            size = human_int(given) if isinstance(given, str) else given
        except ValueError:
            raise self.refuse(option, f"must be a size such as 4GiB, got {given!r}") from None
        if not self.seal.frame_bytes <= size <= 2**60:
            raise self.refuse(option, f"must be between {self.seal.frame_bytes} (one KV block) and {2**60}")
        return size


MakeConnector = Callable[[ConnectorContext], BlockStore]
