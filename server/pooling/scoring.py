"""POST /v1/score, /score, and /rerank under its three names: how well texts go together."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from troupellm.actors.client.pooling import Scored
from troupellm.actors.input.prepare import require_pooling
from troupellm.protocol.api.chat import UsageBody
from troupellm.protocol.api.pooling import (
    PoolingEnvelope,
    PoolingFields,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    ScoreItem,
    ScoreRequest,
)
from troupellm.protocol.api.usage import PromptTokensDetails
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.parameters import truncation_of
from troupellm.server.pooling.answers import respond_items
from troupellm.server.pooling.inputs import (
    as_texts,
    check_number,
    name_in,
    naming,
    options,
    pooling_params,
    refuse_unsupported,
)

_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


async def score(host: ServerState, exchange: Exchange, request: ScoreRequest) -> None:
    model = await host.check_model(exchange, request.model)
    first, second = _pair_of(request)
    most = host.config.max_pooling_inputs
    ones = as_texts(first, getattr(request, first), most)
    others = as_texts(second, getattr(request, second), most)
    if len(ones) not in (1, len(others)):
        raise InvalidRequest(
            f"{first} must have one entry or as many as {second} ({len(others)}), got {len(ones)}", param=first
        )
    answer_id = f"score-{request.request_id or secrets.token_hex(16)}"
    names = name_in(first, getattr(request, first)), name_in(second, getattr(request, second))
    scored = await _scores(host, exchange, request, answer_id, (ones, others), names)
    tokens = _account(exchange, scored)
    usage = UsageBody(tokens, 0, tokens, PromptTokensDetails(0, _truncated(scored)))
    envelope = PoolingEnvelope(id=answer_id, created=host.now(), model=model, usage=usage)
    items = (ScoreItem(index=index, score=pair.score) for index, pair in enumerate(scored))
    await respond_items(exchange, envelope, items)


async def rerank(host: ServerState, exchange: Exchange, request: RerankRequest) -> None:
    model = await host.check_model(exchange, request.model)
    check_number("documents", len(request.documents), host.config.max_pooling_inputs)
    if not request.documents:
        raise InvalidRequest("documents must not be empty", param="documents", code="empty_array")
    if request.top_n is not None and request.top_n < 0:
        raise InvalidRequest("top_n must be at least 0", param="top_n", code="integer_below_min_value")
    texts = [_document_text(index, document) for index, document in enumerate(request.documents)]
    answer_id = f"rerank-{request.request_id or secrets.token_hex(16)}"
    names = name_in("query", request.query), name_in("documents", texts)
    scored = await _scores(host, exchange, request, answer_id, ([request.query], texts), names)
    tokens = _account(exchange, scored)
    ranked = sorted(range(len(texts)), key=lambda index: -scored[index].score)
    results = [
        RerankResult(
            index=index,
            document=UNSET if request.return_documents is False else RerankDocument(texts[index]),
            relevance_score=scored[index].score,
        )
        for index in ranked[: request.top_n or None]
    ]
    usage = RerankUsage(tokens, tokens, _truncated(scored))
    response = RerankResponse(id=answer_id, model=model, usage=usage, results=results)
    await exchange.respond(200, msgspec.json.encode(response))


async def _scores(
    host: ServerState,
    exchange: Exchange,
    request: PoolingFields,
    answer_id: str,
    texts: tuple[Sequence[str], Sequence[str]],
    names: tuple[Callable[[int], str], Callable[[int], str]],
) -> list[Scored]:
    """
    Args:
        names: what errors call the entries of either side.
    """
    engine = host.require()
    refuse_unsupported(request)
    ability = require_pooling(engine.ready)
    by_vectors = ability.scores_by_vectors
    params = pooling_params(engine, request, "embed" if by_vectors else "score")
    ones = len(texts[0]) if by_vectors else 0  # a cross-encoder reads pairs, which are named after their second text

    def name(index: int) -> str:
        return names[0](index) if index < ones else names[1](index - ones)

    with naming(exchange, name):
        scored = await engine.score_pairs(
            *texts, params, truncation=truncation_of(request, "right"), **options(exchange, request, answer_id)
        )
    exchange.quota = scored[0].quota
    return scored


def _pair_of(request: ScoreRequest) -> tuple[str, str]:
    """The two fields that are given.

    Raises:
        InvalidRequest: none, half of a pair, or more.
    """
    given = {name for pair in _PAIRS for name in pair if getattr(request, name) is not None}
    for pair in _PAIRS:
        if given == set(pair):
            return pair
    names = ", ".join(f"{one} and {other}" for one, other in _PAIRS)
    missing = "text_1" if not given else min(given)
    raise InvalidRequest(f"give exactly one of these pairs: {names}", param=missing, code="missing_required_parameter")


def _document_text(index: int, document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        here = f"documents[{index}]"
        raise InvalidRequest(f"{here} must be a text, or an object with a text", param=here, code="invalid_type")
    return text


def _account(exchange: Exchange, scored: Sequence[Scored]) -> int:
    """Prompt tokens, for the answer and for the access line."""
    exchange.prompt_tokens, exchange.completion_tokens = sum(pair.prompt_tokens for pair in scored), 0
    return exchange.prompt_tokens


def _truncated(scored: Sequence[Scored]) -> bool | UnsetType:
    return True if any(pair.truncated for pair in scored) else UNSET
