"""The routes of models that pool."""

from functools import partial
from typing import Any

from troupellm.protocol.api.pooling import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from troupellm.server.base.router import Route
from troupellm.server.host.server_state import ServerState
from troupellm.server.pooling import cohere, scoring, vectors


def routes(host: ServerState, prefix: str) -> list[Route]:
    def post(path: str, handler: Any, body: Any, response: Any, summary: str) -> Route:
        return Route(
            method="POST", path=path, handler=partial(handler, host), body=body, response=response, summary=summary
        )

    by_score = "How well texts go together."
    by_rank = "Documents, best first for a query."
    ranks = dict.fromkeys((f"{prefix}/rerank", "/v2/rerank", "/rerank"))
    scores = dict.fromkeys((f"{prefix}/score", "/score"))
    return [
        post(f"{prefix}/embeddings", vectors.embeddings, EmbeddingRequest, EmbeddingResponse, "Vectors of texts."),
        post(
            "/v2/embed", cohere.embed, cohere.EmbedRequest, cohere.EmbedResponse, "Vectors of texts, as Cohere has it."
        ),
        post("/pooling", vectors.pooling, PoolingRequest, PoolingResponse, "What the model pools, as it is."),
        post("/classify", vectors.classify, ClassifyRequest, ClassifyResponse, "Which label fits a text."),
        *(post(path, scoring.score, ScoreRequest, ScoreResponse, by_score) for path in scores),
        *(post(path, scoring.rerank, RerankRequest, RerankResponse, by_rank) for path in ranks),
    ]
