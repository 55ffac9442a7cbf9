"""/render answers with the request that the generating route would have given to the engine."""

import pytest

from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def test_a_rendered_chat_has_the_prompt_and_the_parameters_of_its_answer(tiny_engine):
    body = {"messages": HI, "max_tokens": 3, "temperature": 0, "stop": ["x"], "request_id": "mine", "ignore_eos": True}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        rendered = (await client.post(f"{CHAT}/render", json=body | {"stream": True, "priority": 2})).json()
        answer = (await client.post(CHAT, json=body | {"return_token_ids": True})).json()
        ids = {"prompt": rendered["token_ids"], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        completed = (await client.post(TEXT, json=ids)).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    assert (rendered["request_id"], rendered["model"]) == ("chatcmpl-mine", "tiny")
    assert (rendered["stream"], rendered["priority"]) == (True, 2)
    params = rendered["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["stop"]) == (3, 0.0, ["x"])
    assert completed["choices"][0]["text"] == answer["choices"][0]["message"]["content"]


async def test_every_prompt_of_a_completion_is_rendered(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        rendered = (await client.post(f"{TEXT}/render", json={"prompt": ["ab", "cde"]})).json()
        cut = {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2}
        tokens = (await client.post(f"{TEXT}/render", json=cut)).json()
        plain = [(await client.post("/tokenize", json={"prompt": text})).json()["tokens"] for text in ("ab", "cde")]
    assert [one["token_ids"] for one in rendered] == plain
    assert [one["token_ids"] for one in tokens] == [[6, 7]]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (CHAT, {"messages": HI, "temperature": -1}, "decimal_below_min_value"),
        (CHAT, {"messages": []}, None),
        (TEXT, {"prompt": "x" * 20_000}, "context_length_exceeded"),
        (TEXT, {"prompt": [10**6]}, None),
    ],
)
async def test_render_refuses_the_bodies_that_generation_refuses(tiny_engine, path, body, code):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answers = [await client.post(place, json=body) for place in (path, f"{path}/render")]
    assert [answer.status_code for answer in answers] == [400, 400], answers[1].text
    errors = [answer.json()["error"] for answer in answers]
    assert errors[0]["param"] == errors[1]["param"]
    assert code is None or errors[1]["code"] == code
