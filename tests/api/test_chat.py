import pytest

from troupellm.tests.support.servers.serving import events_of, running_server

pytestmark = pytest.mark.anyio

QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}


async def test_whole_answer_has_openai_shape(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        response = await client.post("/v1/chat/completions", json=QUESTION | {"ignore_eos": True})
        body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert list(choice["message"]) == ["role", "content", "refusal"]
    assert (choice["message"]["role"], choice["message"]["refusal"]) == ("assistant", None)
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 12
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert body["system_fingerprint"].startswith("troupe-")


async def test_stream_gives_the_same_answer_in_the_exact_order(tiny_engine):
    request = QUESTION | {"ignore_eos": True, "return_token_ids": True}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        whole = (await client.post("/v1/chat/completions", json=request)).json()
        response = await client.post("/v1/chat/completions", json=request | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    events = events_of(response.text)
    choices = [event["choices"][0] for event in events]
    assert all("usage" not in event for event in events)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    tokens = [token for choice in choices for token in choice.get("token_ids", [])]
    assert tokens == whole["choices"][0]["token_ids"]
    assert whole["prompt_token_ids"]
    assert [event.get("prompt_token_ids") for event in events] == [
        whole["prompt_token_ids"],
        *[None] * (len(events) - 1),
    ]
    assert len({event["id"] for event in events}) == 1
    assert ["system_fingerprint" in event for event in events] == [False] * (len(events) - 1) + [True]


async def test_usage_comes_in_one_extra_chunk_when_asked(tiny_engine):
    request = QUESTION | {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        plain = events_of((await client.post("/v1/chat/completions", json=request)).text)
        request["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        running = events_of((await client.post("/v1/chat/completions", json=request)).text)
    assert [event["usage"] for event in plain[:-1]] == [None] * (len(plain) - 1)
    assert plain[-1]["choices"] == []
    assert plain[-1]["usage"]["completion_tokens"] == 12
    counts = [event["usage"]["completion_tokens"] for event in running]
    assert counts == sorted(counts)
    assert counts[-1] == 12


async def test_n_choices_are_separate(tiny_engine):
    request = QUESTION | {"n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        whole = (await client.post("/v1/chat/completions", json=request)).json()
        events = events_of((await client.post("/v1/chat/completions", json=request | {"stream": True})).text)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert streamed == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    assert len({tuple(tokens) for tokens in streamed.values()}) == 3
    assert whole["usage"]["completion_tokens"] == 36


async def test_logprobs_carry_top_alternatives_and_bytes(tiny_engine):
    request = QUESTION | {"logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        whole = (await client.post("/v1/chat/completions", json=request)).json()
        events = events_of((await client.post("/v1/chat/completions", json=request | {"stream": True})).text)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == 12
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0 for entry in entries)
    streamed = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in entries]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in entries], abs=1e-4)


async def test_content_parts_and_developer_role_are_taken(tiny_engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a\nb"}]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        one = (await client.post("/tokenize", json={"messages": messages})).json()
        two = (await client.post("/tokenize", json={"messages": plain})).json()
        answer = await client.post("/v1/chat/completions", json=QUESTION | {"messages": messages})
    assert one["tokens"] == two["tokens"]
    assert answer.status_code == 200


async def test_max_completion_tokens_is_the_same_limit(tiny_engine):
    request = {key: value for key, value in QUESTION.items() if key != "max_tokens"} | {"ignore_eos": True}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answer = (await client.post("/v1/chat/completions", json=request | {"max_completion_tokens": 3})).json()
        refused = await client.post("/v1/chat/completions", json=request | {"max_completion_tokens": 0})
    assert answer["usage"]["completion_tokens"] == 3
    assert refused.json()["error"]["param"] == "max_completion_tokens"
    assert refused.json()["error"]["message"].startswith("max_completion_tokens ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": "text"}, "response_format"),
        ({"guided_json": {}}, None),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0].function"),
        ({"tools": []}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"best_of": 2}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"continue_final_message": True}, "messages[0].role"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"logprobs": False, "top_logprobs": 0, "modalities": ["text"], "length_penalty": 1.0}, None),
        ({"stream_options": None, "max_tokens": None, "max_completion_tokens": 3, "stop": None, "n": None}, None),
        ({"user": "someone", "metadata": {"a": "b"}, "frobnicate": 1}, None),
    ],
)
async def test_unsupported_chat_fields_are_refused_by_name(tiny_engine, fields, param):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        response = await client.post("/v1/chat/completions", json=QUESTION | fields)
    assert response.status_code == (200 if param is None else 400), response.text
    assert response.json().get("error", {}).get("param") == param
