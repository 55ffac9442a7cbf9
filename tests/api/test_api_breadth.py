"""Smaller doors and fields of the APIs, through the app on a socket."""

import httpx
import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


async def test_a_request_without_a_model_means_the_served_one(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/messages", {"messages": HI}),
        ):
            answer = await client.post(path, json=GREEDY | body)
            assert (answer.status_code, answer.json()["model"]) == (200, "tiny"), answer.text
        other = await client.post("/v1/completions", json={"prompt": "Hi", "model": "nobody"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_list_of_models_has_both_shapes(tiny_engine):
    async with tiny_engine(max_model_len=64) as engine, running_server(engine) as served, served.client() as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/tiny")).json()
    (card,) = listed["data"]
    assert (listed["object"], listed["first_id"], listed["last_id"], listed["has_more"]) == (
        "list",
        "tiny",
        "tiny",
        False,
    )
    assert card == one
    assert (card["object"], card["type"], card["display_name"], card["lifecycle"]) == (
        "model",
        "model",
        "tiny",
        "active",
    )
    assert (card["max_model_len"], card["max_input_tokens"], card["max_tokens"]) == (64, 63, 63)
    assert card["created_at"].endswith("Z")
    assert card["capabilities"]["structured_outputs"] == {"supported": True}
    assert card["capabilities"]["image_input"] == {"supported": False}


async def test_the_root_and_a_posted_ping_answer(tiny_engine):
    config = server_config(api_key=("secret",))
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        asked = {"accept": "application/json"}
        root, ping = await client.get("/", headers=asked), await client.post("/ping")
    assert (root.status_code, root.json()) == (200, {"name": "troupellm", "status": "ok"})
    assert (ping.status_code, ping.json()["status"]) == (200, "ready")


async def test_status_lines_have_a_reason(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answers = [await client.get("/"), await client.get("/nowhere"), await client.post("/v1/models")]
    assert [answer.reason_phrase for answer in answers] == ["OK", "Not Found", "Method Not Allowed"]
    raw = [answer.extensions["reason_phrase"] for answer in answers]
    assert raw == [b"OK", b"Not Found", b"Method Not Allowed"]


async def test_blocks_of_text_have_no_null_citations_and_updates_are_shown(tiny_engine):
    thinking = {"type": "adaptive", "display": "updates"}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answer = await client.post("/v1/messages", json=GREEDY | {"messages": HI, "thinking": thinking})
    assert answer.status_code == 200
    assert answer.json()["content"]
    assert all("citations" not in block for block in answer.json()["content"])


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def say(client: httpx.AsyncClient, messages: list, **fields: object) -> httpx.Response:
    return await client.post("/v1/messages", json=GREEDY | {"messages": messages} | fields)


def prompt_tokens(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def following(answer: httpx.Response) -> dict[str, str]:
    return {"type": "continue", "previous_message_id": answer.json()["id"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thread_is_continued_with_its_new_turn_only(tiny_engine, stream):
    system = [{"type": "text", "text": "Be brief."}]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        if stream:
            first = await say(client, HI, system=system, thread={"type": "create"}, stream=True)
            name = first.text.partition('"id":"')[2].partition('"')[0]
            thread = {"type": "continue", "previous_message_id": name}
            content = (await say(client, HI, system=system)).json()["content"]
        else:
            first = await say(client, HI, system=system, thread={"type": "create"})
            thread, content = following(first), first.json()["content"]
        counted = await client.post("/v1/messages/count_tokens", json={"messages": [message("More")], "thread": thread})
        second = await say(client, [message("More")], thread=thread)
        whole = await say(client, [*HI, {"role": "assistant", "content": content}, message("More")], system=system)
        third = await say(client, [message("Again")], thread=following(second))
        again = await say(client, [message("More")], thread=thread)
        metrics = (await client.get("/metrics")).text
    assert second.status_code == third.status_code == 200, second.text
    assert second.json()["content"] == whole.json()["content"]
    assert counted.json()["input_tokens"] == prompt_tokens(second)
    assert (
        third.json()["usage"]["input_tokens"] + third.json()["usage"]["cache_read_input_tokens"]
        > counted.json()["input_tokens"]
    )
    assert (again.status_code, again.json()["error"]["type"]) == (404, "not_found_error")
    assert again.json()["error"]["details"] == {"error_code": "thread_not_found"}
    assert "troupellm_message_threads 1.0" in metrics


async def test_a_thread_of_another_key_is_not_found(tiny_engine):
    config = server_config(api_key=("one", "two"))
    async with (
        tiny_engine() as engine,
        running_server(engine, config) as served,
        served.client(key="one") as one,
        served.client(key="two") as two,
    ):
        first = await say(one, HI, thread={"type": "create"})
        foreign = await say(two, HI, thread=following(first))
        own = await say(one, HI, thread=following(first))
    assert (foreign.status_code, own.status_code) == (404, 200)


@pytest.mark.parametrize(
    ("thread", "param"),
    [
        ({"type": "continue"}, "thread.previous_message_id is missing"),
        ({"type": "fork"}, "thread.type"),
        ({"type": "continue", "previous_message_id": "x" * 257}, "thread.previous_message_id"),
        ("create", "thread"),
    ],
)
async def test_a_thread_that_cannot_be_is_refused(tiny_engine, thread, param):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answer = await say(client, HI, thread=thread)
    assert answer.status_code == 400
    assert param in answer.json()["error"]["message"]


async def test_a_thread_and_a_request_are_bounded_together(tiny_engine):
    config = server_config(max_body_bytes=2000)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        first = await say(client, [message("x" * 1500)], thread={"type": "create"})
        more = await say(client, [message("x" * 1500)], thread=following(first))
        fault = await say(client, [{"role": "user", "content": [{"type": "tool_result"}]}], thread=following(first))
    assert (first.status_code, more.status_code) == (200, 413)
    if fault.status_code == 400:
        assert "messages[0]" in fault.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (path, {field: "a"}, field)
        for path in ("/v1/responses", "/v1/messages")
        for field in ("json_schema", "regex", "ebnf")
    ],
)
async def test_names_of_other_servers_for_a_format_are_refused(tiny_engine, path, fields, field):
    body = {"input": "Hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 4}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answer = await client.post(path, json=body | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


async def test_sglangs_names_of_a_form_are_kept(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        text = await client.post("/v1/completions", json=GREEDY | {"prompt": "Hi", "regex": "a{3}", "ignore_eos": None})
        chat = await client.post("/v1/chat/completions", json={"messages": HI, "ebnf": 'root ::= "b" "c"'})
    assert text.json()["choices"][0]["text"] == "aaa"
    assert chat.json()["choices"][0]["message"]["content"] == "bc"


async def test_a_salt_may_be_text(tiny_engine):
    prompt = list(range(5, 40))
    async with tiny_engine() as engine:
        await engine.generate(prompt, max_tokens=1, cache_salt="A")
        same = await engine.generate(prompt, max_tokens=1, cache_salt=b"A")
        other = await engine.generate(prompt, max_tokens=1, cache_salt="B")
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate(prompt, max_tokens=1, cache_salt=5)
    assert same.usage.cached_tokens > other.usage.cached_tokens == 0
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("path", ["/models", "/v1/v1/models", "/models/tiny", "/v1/v1/models/tiny"])
async def test_paths_without_the_prefix_or_with_two_lead_to_the_route(tiny_engine, path):
    config = server_config(api_key=("secret",))
    async with tiny_engine() as engine, running_server(engine, config) as served:
        async with served.client(key="secret") as client:
            assert (await client.get(path)).status_code == 200
            posted = await client.post("/v1/v1/messages", json=GREEDY | {"messages": HI})
            unknown = [await client.get(other) for other in ("/v1/v1/v1/models", "/v1/health", "/v1/v1")]
        async with served.client() as client:
            refused = await client.get(path)
    assert (posted.status_code, posted.json()["type"]) == (200, "message")
    assert {answer.status_code for answer in unknown} == {404}
    assert refused.status_code == 401


async def test_invocations_go_by_the_fields_of_the_body(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        chat = await client.post("/invocations", json=GREEDY | {"messages": HI})
        text = await client.post("/invocations", json=GREEDY | {"prompt": "Hi", "stream": True})
        wrong = await client.post("/invocations", json={"prompt": "Hi", "temperature": "hot"})
        unknown = await client.post("/invocations", json={"inputs": "Hi"})
        listed = await client.post("/invocations", json=[1])
    assert chat.json()["object"] == "chat.completion"
    assert text.text.endswith("data: [DONE]\n\n")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
    assert (unknown.status_code, listed.status_code) == (400, 400)


async def test_facts_about_the_tokenizer(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        told = (await client.get("/tokenizer_info")).json()
        assert told["vocab_size"] == engine.limits.vocab_width
        assert told["eos_token_ids"] == sorted(engine.tokenizer.eos_token_ids)
    assert "messages" in told["chat_template"]


@pytest.mark.parametrize(("metrics", "status"), [("key", 401), ("open", 200)])
async def test_metrics_need_a_key_unless_they_are_open(tiny_engine, metrics, status):
    config = server_config(api_key=("secret",), metrics=metrics)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        answer = await client.get("/metrics")
        others = [await client.get(path) for path in ("/v1/models", "/load", "/metrics/")]
    assert answer.status_code == status
    assert (b"troupellm_" in answer.content) is (status == 200)
    assert {other.status_code for other in others} == {401}
