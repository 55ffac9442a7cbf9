"""Bad values on every generating route, streamed and not."""

from collections.abc import Iterable, Mapping
from typing import Any

from troupellm.tests.support.servers.canary import Attacked

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}
OK = "served"


async def check_matrix(
    attacked: Attacked,
    cases: Iterable[tuple[Mapping[str, Any], str | None]],
    *,
    routes: Iterable[str] = tuple(ROUTES),
    status: int = 400,
    sparse: bool = False,
) -> None:
    """Send every case to every route, whole and streamed (`sparse`: one of these, in turn); each is refused naming its
    parameter, or served where that is `OK`."""
    wrong = []
    ways = [(route, stream) for route in routes for stream in (False, True)]
    for number, (fields, param) in enumerate(cases):
        for route, stream in [way for way in ways if way[1] == number % 2] if sparse else ways:
            body = {"model": attacked.engine.model_names[0], "max_tokens": 2, "stream": stream}
            body |= {**ROUTES[route], **fields}
            response = await attacked.client.post(route, json=body)
            problem = _served(response) if param == OK else _refused(response, status, param)
            if problem:
                wrong.append((route, stream, str(fields)[:120], param, problem))
    assert not wrong, "\n".join(map(str, wrong))


def _served(response: Any) -> str | None:
    if response.status_code != 200 or '"error"' in response.text:
        return f"{response.status_code} {response.text[:300]}"
    return None


def _refused(response: Any, status: int, param: str | None) -> str | None:
    if response.status_code != status:
        return f"{response.status_code} {response.text[:300]}"
    error = response.json()["error"]
    if set(error) != {"message", "type", "param", "code"} or len(error["message"]) > 512:
        return f"shape {error}"
    if error["param"] != param or not isinstance(error["code"], str):
        return f"param {error}"
    return None
