"""The routes of Ollama's API, on the one served model."""

from functools import partial
from typing import Any

from troupellm.protocol.api.ollama import (
    OllamaChatLine,
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateLine,
    OllamaGenerateRequest,
    OllamaModelInfo,
    OllamaModels,
    OllamaNamedRequest,
    OllamaStatus,
    OllamaVector,
    OllamaVectors,
    OllamaVersion,
)
from troupellm.server.base.router import Route
from troupellm.server.host.server_state import ServerState
from troupellm.server.ollama import embed, generate, models


def routes(host: ServerState) -> list[Route]:
    """None where the door is closed."""
    if not host.config.ollama:
        return []

    def route(method: str, path: str, handler: Any, response: Any, summary: str, **more: Any) -> Route:
        return Route(
            method=method,
            path=path,
            handler=partial(handler, host),
            response=response,
            summary=f"{summary} (Ollama's API).",
            error_shape="ollama",
            **more,
        )

    def writing(path: str, handler: Any, body: Any, line: Any, summary: str) -> Route:
        lines: dict[str, Any] = {"body": body, "streams": True, "lines": True, "events": (line,)}
        return route("POST", path, handler, line, summary, **lines)

    named = {"body": OllamaNamedRequest}
    return [
        writing("/api/chat", generate.chat, OllamaChatRequest, OllamaChatLine, "Answer a conversation"),
        writing("/api/generate", generate.generate, OllamaGenerateRequest, OllamaGenerateLine, "Answer a prompt"),
        writing("/api/pull", models.pull, OllamaNamedRequest, OllamaStatus, "That a served model is there"),
        route("POST", "/api/show", models.show, OllamaModelInfo, "Facts about a model", **named),
        route("POST", "/api/embed", embed.embed, OllamaVectors, "Vectors of texts", body=OllamaEmbedRequest),
        route(
            "POST",
            "/api/embeddings",
            embed.embeddings,
            OllamaVector,
            "The vector of a text",
            body=OllamaEmbeddingRequest,
        ),
        route("GET", "/api/tags", models.tags, OllamaModels, "What is served"),
        route("GET", "/api/ps", models.loaded, OllamaModels, "What is in memory"),
        route("GET", "/api/version", models.version, OllamaVersion, "The version of this API"),
    ]
