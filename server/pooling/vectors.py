"""POST /v1/embeddings, /pooling and /classify: one vector per input."""

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import msgspec

from troupellm.protocol.api.pooling import (
    ClassifyItem,
    ClassifyRequest,
    EmbeddingItem,
    EmbeddingRequest,
    InputFields,
    PoolingEnvelope,
    PoolingItem,
    PoolingRequest,
    VectorFields,
)
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.outputs import Pooled
from troupellm.protocol.params.pooling import PoolingTask
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.parameters import unsupported
from troupellm.server.pooling.answers import account, encode_vector, respond_items
from troupellm.server.pooling.inputs import (
    ENCODINGS,
    name_in,
    naming,
    options,
    pooling_params,
    prompts_of,
    refuse_unsupported,
)

Item = Callable[[int, Pooled], msgspec.Struct]


async def embeddings(host: ServerState, exchange: Exchange, request: EmbeddingRequest) -> None:
    encode = _encoder(request)

    def item(index: int, pooled: Pooled) -> msgspec.Struct:
        return EmbeddingItem(index=index, embedding=encode(pooled.vector))

    await _answer(host, exchange, request, "embd", "embed", item)


async def pooling(host: ServerState, exchange: Exchange, request: PoolingRequest) -> None:
    encode = _encoder(request)

    def item(index: int, pooled: Pooled) -> msgspec.Struct:
        return PoolingItem(index=index, data=encode(pooled.vector))

    await _answer(host, exchange, request, "pool", cast(PoolingTask | None, request.task), item)


async def classify(host: ServerState, exchange: Exchange, request: ClassifyRequest) -> None:
    ability = host.require().ready.pooling
    labels: Sequence[str] = ability.labels if ability else ()

    def item(index: int, pooled: Pooled) -> msgspec.Struct:
        probs = pooled.values
        best = max(range(len(probs)), key=probs.__getitem__)
        return ClassifyItem(index=index, label=labels[best], probs=probs, num_classes=len(probs))

    await _answer(host, exchange, request, "classify", "classify", item)


async def _answer(
    host: ServerState, exchange: Exchange, request: InputFields, kind: str, task: PoolingTask | None, item: Item
) -> None:
    engine = host.require()
    model = await host.check_model(exchange, request.model)
    refuse_unsupported(request)
    params = pooling_params(engine, request, task)
    read = partial(prompts_of, request, host.config.max_pooling_inputs)
    prompts = await offload(read) if is_large(exchange) else read()
    answer_id, created = f"{kind}-{request.request_id or secrets.token_hex(16)}", host.now()
    with naming(exchange, name_in("input", request.input)):
        pooled = await engine.pool_all(prompts, params, **options(exchange, request, answer_id))
    exchange.quota = pooled[0].quota
    envelope = PoolingEnvelope(id=answer_id, created=created, model=model, usage=account(exchange, pooled))
    await respond_items(exchange, envelope, (item(index, each) for index, each in enumerate(pooled)))


def _encoder(request: VectorFields) -> Callable[[bytes], list[float] | str]:
    """How the request wants its vectors.

    Raises:
        InvalidRequest: a form that is not offered.
    """
    wanted = request.encoding_format or "float"
    if wanted in ("bytes", "bytes_only"):
        raise unsupported("encoding_format", f"{wanted} is not supported; use base64")
    if wanted not in ENCODINGS:
        raise InvalidRequest(f"encoding_format must be one of {', '.join(ENCODINGS)}", param="encoding_format")
    if request.embed_dtype not in (None, "float32"):
        raise unsupported("embed_dtype", "only float32 is supported")
    if wanted == "float" and request.endianness not in (None, "native", "little"):
        raise InvalidRequest("endianness needs encoding_format base64", param="endianness")
    return partial(encode_vector, base64=wanted == "base64", big=request.endianness == "big")
