"""Every route of the API, and the function that answers it."""

from functools import partial
from typing import Any

from troupellm.protocol.api.chat import (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    LoadBody,
    ProbeReport,
    TextChunk,
    TextResponse,
    TokenizeRequest,
    TokenizeResponse,
    VersionBody,
    Welcome,
)
from troupellm.protocol.api.model_info import ModelCard, ModelList, TokenizerInfo
from troupellm.protocol.api.rendered import RenderedRequest
from troupellm.server.admin import adapters as adapter_routes, probes, routes as admin_routes
from troupellm.server.app import invocations
from troupellm.server.base.router import Route, RouteScope
from troupellm.server.batches import routes as batch_routes
from troupellm.server.host.server_state import ServerState
from troupellm.server.messages.routes import routes as messages_routes
from troupellm.server.ollama.routes import routes as ollama_routes
from troupellm.server.openai import chat, completions, kv_sessions, models, render, tokenize
from troupellm.server.pooling.routes import routes as pooling_routes
from troupellm.server.responses.routes import routes as responses_routes

METRICS_PATH = b"/metrics"
PROBES = frozenset({b"/health", b"/readyz", b"/ping", b"/livez", b"/startupz"})


def routes(host: ServerState, prefix: str) -> list[Route]:
    """The API's routes behind `prefix`, and those of the server itself at their fixed places."""
    return [
        *_generation_routes(host, prefix),
        *_model_routes(host, prefix),
        *_probe_routes(host),
        *_metrics_route(host),
        *pooling_routes(host, prefix),
        *responses_routes(host, prefix),
        *messages_routes(host, prefix),
        *ollama_routes(host),
        *batch_routes.routes(host, prefix),
        *kv_sessions.routes(host, prefix),
        *admin_routes.routes(host, prefix),
        *adapter_routes.routes(host, prefix),
    ]


def _generation_routes(host: ServerState, prefix: str) -> list[Route]:
    """Chat and completions, and their prompts."""

    def post(path: str, handler: Any, body: Any, **more: Any) -> Route:
        return Route(method="POST", path=path, handler=partial(handler, host), body=body, **more)

    return [
        post(
            f"{prefix}/chat/completions",
            chat.create,
            ChatRequest,
            response=ChatResponse,
            streams=True,
            events=(ChatChunk,),
            summary="Answer a conversation.",
        ),
        post(
            f"{prefix}/completions",
            completions.create,
            CompletionRequest,
            response=TextResponse,
            streams=True,
            events=(TextChunk,),
            summary="Complete one or more texts.",
        ),
        post(
            f"{prefix}/chat/completions/render",
            render.chat,
            ChatRequest,
            response=RenderedRequest,
            summary="The prompt of a conversation as token ids.",
        ),
        post(
            f"{prefix}/completions/render",
            render.completions,
            CompletionRequest,
            response=list[RenderedRequest],
            summary="The prompts of a completion as token ids.",
        ),
    ]


def _model_routes(host: ServerState, prefix: str) -> list[Route]:
    """The models, and their tokens."""

    def get(path: str, handler: Any, **more: Any) -> Route:
        return Route(method="GET", path=path, handler=partial(handler, host), **more)

    def post(path: str, handler: Any, body: Any, **more: Any) -> Route:
        return Route(method="POST", path=path, handler=partial(handler, host), body=body, **more)

    return [
        get(f"{prefix}/models", models.listing, response=ModelList, summary="What is served."),
        get(f"{prefix}/models/", models.retrieve, tail=True, response=ModelCard, summary="One of them."),
        post(
            "/tokenize",
            tokenize.tokenize,
            TokenizeRequest,
            response=TokenizeResponse,
            summary="Token ids of a text, or of a conversation.",
        ),
        post(
            "/detokenize",
            tokenize.detokenize,
            DetokenizeRequest,
            response=DetokenizeResponse,
            summary="The text of token ids.",
        ),
        get("/tokenizer_info", tokenize.info, response=TokenizerInfo, summary="Facts about the tokenizer."),
        post(
            "/invocations",
            invocations.invoke,
            dict[str, Any],
            response=dict[str, Any],
            summary="Any of them, by the fields of the body.",
        ),
    ]


def _probe_routes(host: ServerState) -> list[Route]:
    """State of the server. A probe needs no key."""

    def get(path: str, handler: Any, scope: RouteScope = "api", **more: Any) -> Route:
        return Route(method="GET", path=path, handler=partial(handler, host), scope=scope, **more)

    ready: dict[str, Any] = {"response": ProbeReport, "summary": "Whether requests should be sent here."}
    return [
        get("/health", probes.ready, "open", **ready),
        get("/readyz", probes.ready, "open", **ready),
        get("/ping", probes.ready, "open", **ready),
        Route(method="POST", path="/ping", handler=partial(probes.ready, host), scope="open", **ready),
        _root_route(host),
        get("/livez", probes.live, "open", response=ProbeReport, summary="Whether the server needs a restart."),
        get("/startupz", probes.started, "open", response=ProbeReport, summary="Whether the model is loaded."),
        get("/version", probes.version, response=VersionBody, summary="The server's version."),
        get("/load", probes.load, response=LoadBody, summary="How much it has to do."),
    ]


def _root_route(host: ServerState) -> Route:
    """Ollama's clients look at the text of the root; programs that ask for JSON get JSON."""
    form: dict[str, Any] = {"answers": "text/plain"} if host.config.ollama else {"response": Welcome}
    handler, summary = partial(probes.welcome, host), "That the server is there."
    return Route(method="GET", path="/", handler=handler, scope="open", summary=summary, **form)


def _metrics_route(host: ServerState) -> list[Route]:
    """None where the metrics have a port of their own."""
    if host.config.metrics not in ("open", "key"):
        return []
    return [
        Route(
            method="GET",
            path=METRICS_PATH.decode(),
            handler=partial(probes.metrics, host),
            scope="open" if host.config.metrics == "open" else "api",
            answers="text/plain",
            summary="Metrics in Prometheus' text form.",
        )
    ]
