"""The interface of a connector: a `BlockStore` that other engines reach too, made from `kv_transfer_config`.

It has two sides. **The scheduler's** is the engine's own and the same for every connector, built in or plugged in
(`actors/kv_offload/`); no code of a connector runs there. It speaks with the worker in plans and results
(`protocol/messages/kv_transfers.py`), so it never waits, and what is under way is bounded by credits. **The worker's**
is the store, opened by each worker that loads the model, in its process, and called on threads of its tier beside the
steps:

    the scheduler says   the store hears    vLLM's connectors have
    TierLookup           contains           get_num_new_matched_tokens: of a sequence's keys behind what device and host
                                            memory have, how many are there, from the first on
    transfer "fetch"     get                update_state_after_alloc, start_load_kv, get_finished: one block, into a
                                            place of host memory; asked for in the order of the prefix
    transfer "spill"     put                save_kv_layer, wait_for_save: one block, soon after it was full and copied
                                            to host memory, or after kv_offload_store_threshold uses
    transfer "reset"     reset              reset_cache

There is no operation for the end of a request (vLLM's `request_finished`), since nothing waits for it. Blocks go out
while the request runs; its device blocks are free for others before the store has a copy; blocks that still wait when
the engine ends are written then. Nor does a block have an owner. A key is made from everything that matters: model and
settings, adapter, media, and the API key or salt of its namespace. Equal keys hold equal blocks for all requests.

A failure is a miss that is counted. After an impossible answer, an exception, or an operation slower than
`kv_offload_timeout`, the store is not used, and is probed again after 1, 2, 4 .. 60 seconds; a thread that hangs in it
is abandoned. If `contains` reports a block and `get` does not return it whole, the sequence computes it, or its request
fails with `KVLoadFailed`, as `kv_load_failure_policy` says.

**A plug-in** is a callable under the entry point group `troupellm.connectors` that takes a `ConnectorContext` and gives
a `BlockStore`. Its name is what `kv_connector` says. Blocks come to it signed (`context.frame_bytes` each; a store with
`signs_blocks` signs them itself), and count only with the signature whole when they come back. So it need not
authenticate anything: it keeps bytes under keys and may lose them. If `get` gives something else than what was put, the
block is put again when it has been computed: `put`
should replace what is there where it can tell. `plug_in.py` holds it to this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from troupellm.models.hub.secret import derived_key
from troupellm.models.kv_connectors.signed_block import BlockSignature
from troupellm.models.kv_offload.store import BlockStore, StoreContext
from troupellm.protocol.config.allowed_values import with_allowed_values
from troupellm.protocol.config.kv_connectors import FIELD, KVTransferConfig
from troupellm.protocol.config.sizes import human_int
from troupellm.protocol.errors import ConfigError

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
_OPTIONS = f"{FIELD}.kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """The arguments from which a connector is made."""

    config: KVTransferConfig
    store: StoreContext
    secret: bytes
    """Shared by the engines that share blocks; 32 bytes."""

    def key(self, purpose: str) -> bytes:
        """A key of the connector's own, which follows from the secret."""
        return derived_key(self.secret, f"{self.config.kv_connector} {purpose}")

    @property
    def signature(self) -> BlockSignature:
        """The seal of blocks that leave the engine; the same for all connectors: a block may pass through several."""
        key = derived_key(self.secret, "sealed KV blocks")
        return BlockSignature(key, self.store.fingerprint, self.store.block_bytes)

    @property
    def frame_bytes(self) -> int:
        """Size of every block that a plug-in is given to keep."""
        return self.signature.frame_bytes

    def options(self, kind: type[OptionsT]) -> OptionsT:
        """`kv_connector_extra_config` as a Struct, which should forbid unknown fields.

        Raises:
            ConfigError: a field is unknown, missing, or of another type.
        """
        try:
            return msgspec.convert(self.config.kv_connector_extra_config, kind)
        except msgspec.ValidationError as error:
            text, _, path = with_allowed_values(error, kind).partition(" - at `$")
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
        if not self.frame_bytes <= size <= 2**60:
            raise self.refuse(option, f"must be between {self.frame_bytes} (one KV block) and {2**60}")
        return size


MakeConnector = Callable[[ConnectorContext], BlockStore]
