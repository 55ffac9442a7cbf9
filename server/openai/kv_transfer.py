"""`kv_transfer_params`: a router has one engine compute a prompt and another one continue (vLLM's NixlConnector).

The first engine answers where its blocks are, and the router hands that to the second one. Blocks have names that
follow from their content, and carry a seal. So nothing is pinned, no list of blocks is handed over, and wrong
parameters cost time and never a token: an engine asks the peers of its own configuration, and no address that a request
brings.
"""

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from troupellm.protocol.api.chat import GenerationFields
from troupellm.protocol.api.kv_transfer import KVTransferParams, RemoteBlocks
from troupellm.protocol.config.kv_connectors import KVTransferConfig, read_transfer_configs
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.skipped import skipped_names
from troupellm.server.host.server_state import ServerState

FIELD: Final = "kv_transfer_params"
_LOOPBACK: Final = "127.0.0.1"


def remote_blocks(
    host: ServerState, exchange: Exchange, request: GenerationFields, *, streaming: bool, background: bool = False
) -> RemoteBlocks | UnsetType:
    """The answer's `kv_transfer_params`; UNSET where the request asks for none.

    Args:
        background: the answer is made after the response to this exchange.

    Raises:
        InvalidRequest: they cannot be followed here.
    """
    if not request.kv_transfer_params:
        return UNSET
    params = _read(request.kv_transfer_params)
    connectors = read_transfer_configs(host.require().config.offload.kv_transfer_config)
    if params.do_remote_decode is None and params.do_remote_prefill is None:
        raise _invalid("must have do_remote_decode or do_remote_prefill")
    if params.do_remote_decode and params.do_remote_prefill:
        raise _invalid("must have one of do_remote_decode and do_remote_prefill, got both")
    if params.do_remote_prefill:
        _check_consumer(connectors)
        peers = [_place(peer) for each in connectors for peer in _listed(each.kv_connector_extra_config.get("peers"))]
        place = (params.remote_host or "", str(params.remote_port or 0))
        if peers and place[1] != "0" and place not in peers:
            host.skipped.report(exchange, skipped_names("peer", [f"{place[0]}-{place[1]}"]))
    if not params.do_remote_decode:
        return UNSET
    if background:
        raise _invalid("do_remote_decode needs background: false, since the answer tells where the blocks are")
    if streaming:
        raise _invalid("do_remote_decode needs stream: false, since the answer tells where the blocks are")
    producers = [each for each in connectors if each.produces]
    if not producers:
        raise _invalid("do_remote_decode needs a connector that produces: start with --kv-transfer-config")
    listen = next((each.kv_connector_extra_config.get("listen") for each in producers), None)
    name, port = (exchange.server, "0") if listen is None else _place(listen)
    if name in ("0.0.0.0", "::"):
        name = exchange.server
    return RemoteBlocks(remote_engine_id=host.fingerprint(), remote_host=name, remote_port=int(port))


def _read(given: Any) -> KVTransferParams:
    try:
        return msgspec.convert(given, KVTransferParams)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _check_consumer(connectors: tuple[KVTransferConfig, ...]) -> None:
    if not any(each.consumes for each in connectors):
        raise _invalid("do_remote_prefill needs a connector that consumes: start with --kv-transfer-config")


def _listed(peers: Any) -> list[Any]:
    return [] if peers is None else peers if isinstance(peers, list) else [peers]


def _place(given: str | int) -> tuple[str, str]:
    """Host and port of host:port, [host]:port, or a port on loopback."""
    name, _, port = str(given).rpartition(":")
    return name.removeprefix("[").removesuffix("]") or _LOOPBACK, port


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}: {problem}", param=FIELD, code="unsupported_parameter")
