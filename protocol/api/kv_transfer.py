"""`kv_transfer_params` of requests and answers, under vLLM's keys."""

import msgspec


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's keys; those of other connectors are not looked at."""

    do_remote_decode: bool | None = None
    """The answer goes on in another engine: tell where the blocks are."""
    do_remote_prefill: bool | None = None
    """Another engine has computed the prompt."""
    remote_host: str | None = None
    remote_port: int | str | None = None


class RemoteBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `do_remote_decode`, for the engine that continues."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_block_ids: tuple[int, ...] = ()
    remote_host: str
    remote_port: int
    """0: not a peer, but a store that both engines have."""
    tp_size: int = 1
