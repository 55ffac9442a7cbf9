"""POST /v2/embed: embeddings in the form of Cohere's API."""

import secrets
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from troupellm.protocol.api.pooling import EmbeddingRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.parameters import unsupported
from troupellm.server.pooling.answers import account, encode_vector
from troupellm.server.pooling.inputs import naming, options, pooling_params, prompts_of

FORMS = ("float", "base64")


class EmbedRequest(msgspec.Struct, kw_only=True):
    texts: list[str] | None = None
    model: str | None = None
    input_type: str | None = None
    """Accepted: the texts are embedded as they are."""
    embedding_types: list[str] | None = None
    """float, base64."""
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """Which end of a text that is too long is cut off; NONE, the default, refuses it."""
    max_tokens: Any = None
    images: Any = None
    inputs: Any = None


class EmbedVectors(msgspec.Struct, kw_only=True):
    floats: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    base64: list[str] | UnsetType = UNSET


class EmbedResponse(msgspec.Struct, kw_only=True):
    id: str
    embeddings: EmbedVectors
    texts: list[str]
    response_type: str = "embeddings_by_type"
    meta: dict[str, Any]


async def embed(host: ServerState, exchange: Exchange, request: EmbedRequest) -> None:
    """
    Raises:
        InvalidRequest: names the field.
    """
    for field in ("max_tokens", "images", "inputs"):
        if getattr(request, field):
            raise unsupported(field)
    exchange.renames = {"dimensions": "output_dimension", "input": "texts"}
    texts, forms = request.texts, request.embedding_types or ["float"]
    if not texts:
        raise InvalidRequest("texts is missing", param="texts", code="missing_required_parameter")
    for form in forms:
        if form not in FORMS:
            raise unsupported("embedding_types", f"only {' and '.join(FORMS)} are supported")
    engine = host.require()
    await host.check_model(exchange, request.model)
    cut = request.truncate in ("START", "END")
    asked = EmbeddingRequest(
        input=list(texts),
        dimensions=request.output_dimension,
        truncate_prompt_tokens=-1 if cut else None,
        truncation_side=("left" if request.truncate == "START" else "right") if cut else None,
    )
    params = pooling_params(engine, asked, "embed")
    prompts = await offload(prompts_of, asked, host.config.max_pooling_inputs)
    name = f"embd-{secrets.token_hex(16)}"
    with naming(exchange, lambda index: f"texts[{index}]"):
        pooled = await engine.pool_all(prompts, params, **options(exchange, asked, name))
    exchange.quota = pooled[0].quota
    usage = account(exchange, pooled)

    def body() -> bytes:
        by_form = {
            form: [encode_vector(each.vector, base64=form == "base64", big=False) for each in pooled] for form in forms
        }
        vectors = msgspec.convert(by_form, EmbedVectors)  # by the names that the answer has
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": usage.prompt_tokens}}
        return msgspec.json.encode(EmbedResponse(id=name, embeddings=vectors, texts=texts, meta=meta))

    await exchange.respond(200, await offload(body))
