"""Every route of the table with a request that it takes, to make bad ones of; and what every answer must be."""

import json
import re
from typing import Any

import httpx
import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.base.router import Route
from troupellm.tests.support.servers.canary import Attacked
from troupellm.tests.support.servers.serving import server_config

SOME = ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/log_level")
ROUTES = [pytest.param(SOME, id="some"), pytest.param((), id="every", marks=pytest.mark.slow)]
"""For `chosen`."""
KEYS = {"open": "secret", "api": "secret", "admin": "boss"}
"""By scope."""

MESSAGES = [{"role": "user", "content": "Hi"}]
_PAIR = {"text_1": "Hi", "text_2": "there"}
_RANKED = {"query": "Hi", "documents": ["there", "here"]}
SAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions/render": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/conversations": {"items": MESSAGES},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": {"messages": MESSAGES, "max_tokens": 2}}]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 2}},
    "/api/pull": {},
    "/api/show": {},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/invocations": {"prompt": "Hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"]},
    "/classify": {"input": "Hi"},
    "/v1/score": _PAIR,
    "/score": _PAIR,
    "/v1/rerank": _RANKED,
    "/v2/rerank": _RANKED,
    "/rerank": _RANKED,
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/abort_requests": {"request_ids": ["nobody"]},
    "/log_level": {"level": "info"},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "sql"},
    "/v1/unload_lora_adapter": {"lora_name": "sql"},
}
"""By path; what has no model of its own gets the served one."""
COUNTING = ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
"""Those whose texts may be longer than the context."""
STORING = ("/v1/conversations", "/v1/conversations/{conversation_id}/items", "/v1/messages/batches")
"""Those that keep texts and make no prompt of them."""
_TEXT = '"Hi"'

_LEAKS = re.compile(
    r"Traceback|site-packages|\.py\b|0x[0-9a-f]{6,}|/(?:work|tmp|root|home|usr|var|etc)/|object at|TROUPE_|secret|boss"
)
_OPENAI = {"message", "type", "param", "code"}
SHAPES = {"openai": _OPENAI, "responses": _OPENAI, "anthropic": {"type", "message"}, "ollama": {"message"}}


def with_keys(**settings: Any) -> ServerConfig:
    """A server that has every route, and wants `KEYS`."""
    return server_config(api_key=("secret",), admin_api_key=("boss",), **settings)


def chosen(attacked: Attacked, only: tuple[str, ...] = ()) -> list[Route]:
    """The routes with these paths; every one without any."""
    return [route for route in attacked.served.app.routes if not only or route.path in only]


async def send(attacked: Attacked, route: Route, content: bytes, **headers: str) -> httpx.Response:
    given = {"content-type": "application/json", "authorization": f"Bearer {KEYS[route.scope]}"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return await attacked.client.post(path_of(route), content=content, headers=given)


def stays_refused(route: Route, answer: httpx.Response, statuses: tuple[int, ...]) -> str | None:
    """The error of an answer that should have one of these statuses."""
    if answer.status_code not in statuses:
        return f"{answer.status_code} {answer.text[:200]}"
    return problem_of(route, answer)


def body_of(route: Route, *, stream: bool = False) -> dict[str, Any]:
    """A request that the route takes."""
    body = {"model": "tiny"} | SAMPLES[route.path]
    return body | {"stream": True} if stream and route.streams else body


def takes_text(path: str) -> bool:
    return _TEXT in json.dumps(SAMPLES[path])


def content_with(path: str, text: str, **more: Any) -> bytes:
    """A request that the route at the path takes, with another text in it."""
    sample = json.dumps({"model": "tiny"} | SAMPLES[path] | more)
    return sample.replace(_TEXT, json.dumps(text, ensure_ascii=False)).encode()


def path_of(route: Route) -> str:
    """Its path, with the name of something that is not there where it takes one."""
    return re.sub(r"\{\w+\}", "nobody", route.path) + ("tiny" if route.tail else "")


def streams_of(route: Route) -> tuple[bool, ...]:
    return (False, True) if route.streams else (False,)


def json_routes(table: list[Route]) -> list[Route]:
    return [route for route in table if route.body is not None]


def problem_of(route: Route, answer: httpx.Response) -> str | None:
    """The error of an answer to any request; None where there is none."""
    if answer.status_code >= 500:
        return f"{answer.status_code} {answer.text[:300]}"
    if answer.status_code >= 400:
        return _problem_of_error(route, answer)
    if answer.headers["content-type"].startswith("text/event-stream"):
        return _problem_of_stream(answer.content)
    if answer.headers["content-type"] == "application/x-ndjson":
        return _problem_of_lines(answer.content)
    if answer.headers["content-type"] == "application/json":
        json.loads(answer.content.decode("utf-8", "strict"), parse_constant=_no_constant)
    return None


def _problem_of_error(route: Route, answer: httpx.Response) -> str | None:
    error = error_of(route, answer.json())
    if set(error) != SHAPES[route.error_shape]:
        return f"shape {error}"
    if len(error["message"]) > 512:
        return "a long message"
    found = _LEAKS.search(answer.text) or _LEAKS.search(str(answer.headers))
    return f"it tells {found[0]}: {answer.text}" if found else None


def error_of(route: Route, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a body; Ollama's is its message alone."""
    error: Any = body["error"]
    return {"message": error} if route.error_shape == "ollama" and isinstance(error, str) else error


def _problem_of_lines(content: bytes) -> str | None:
    lines = [json.loads(line, parse_constant=_no_constant) for line in content.splitlines()]
    ended = lines[-1].get("done") or "status" in lines[-1]
    return None if ended else f"the last line is {lines[-1]}"


def _problem_of_stream(content: bytes) -> str | None:
    for line in content.decode("utf-8", "strict").splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            json.loads(line.removeprefix("data: "), parse_constant=_no_constant)
        elif line and not line.startswith(("data: [DONE]", "event: ", ": ")):
            return f"a line {line[:80]!r}"
    return None


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")
