"""POST /api/embed and /api/embeddings: vectors of unit length."""

import secrets
import time
from functools import partial
from typing import cast

import msgspec

from troupellm.protocol.api.ollama import (
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaVector,
    OllamaVectors,
)
from troupellm.protocol.api.pooling import EmbeddingRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.outputs import Pooled
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.ollama.translate import plain_name
from troupellm.server.pooling.answers import account, encode_vector
from troupellm.server.pooling.inputs import naming, options, pooling_params, prompts_of


async def embed(host: ServerState, exchange: Exchange, request: OllamaEmbedRequest) -> None:
    """
    Raises:
        InvalidRequest: names the field.
    """
    if request.input is None:
        raise InvalidRequest("input is missing", param="input", code="missing_required_parameter")
    texts = [request.input] if isinstance(request.input, str) else request.input
    many = isinstance(request.input, list)
    began = time.monotonic()
    wanted = EmbeddingRequest(
        model=request.model,
        input=list(texts),
        dimensions=request.dimensions,
        truncate_prompt_tokens=None if request.truncate is False else -1,
        truncation_side=None if request.truncate is False else "right",
        use_activation=True,
    )
    pooled = await _vectors(host, exchange, wanted, "input", many=many)

    def body() -> bytes:
        answer = OllamaVectors(
            model=request.model or host.require().model_names[0],
            embeddings=[_numbers(each) for each in pooled],
            total_duration=max(1, round((time.monotonic() - began) * 1e9)),
            load_duration=1,
            prompt_eval_count=account(exchange, pooled).prompt_tokens,
        )
        return msgspec.json.encode(answer)

    await exchange.respond(200, await offload(body))


async def embeddings(host: ServerState, exchange: Exchange, request: OllamaEmbeddingRequest) -> None:
    """
    Raises:
        InvalidRequest: names the field.
    """
    if request.prompt is None:
        raise InvalidRequest("prompt is missing", param="prompt", code="missing_required_parameter")
    texts = [request.prompt] if request.prompt else []
    wanted = EmbeddingRequest(
        model=request.model, input=list(texts), truncate_prompt_tokens=-1, truncation_side="right", use_activation=True
    )
    pooled = await _vectors(host, exchange, wanted, "prompt", many=False)
    account(exchange, pooled)
    body = OllamaVector(embedding=_numbers(pooled[0]) if pooled else [])
    await exchange.respond(200, msgspec.json.encode(body))


async def _vectors(
    host: ServerState, exchange: Exchange, wanted: EmbeddingRequest, field: str, *, many: bool
) -> list[Pooled]:
    """One vector per input; none where there are no inputs, by which clients load a model."""
    engine = host.require()
    await host.check_model(exchange, plain_name(wanted.model, engine.model_names))
    params = pooling_params(engine, wanted, "embed")
    if not wanted.input:
        return []
    exchange.renames = {"input": field}
    read = partial(prompts_of, wanted, host.config.max_pooling_inputs)
    prompts = await offload(read) if is_large(exchange) else read()
    name = f"embd-{secrets.token_hex(16)}"
    with naming(exchange, lambda index: f"{field}[{index}]" if many else field):
        pooled = await engine.pool_all(prompts, params, **options(exchange, wanted, name))
    exchange.quota = pooled[0].quota
    return pooled


def _numbers(pooled: Pooled) -> list[float]:
    return cast(list[float], encode_vector(pooled.vector, base64=False))
