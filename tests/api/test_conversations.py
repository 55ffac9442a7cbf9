"""/v1/conversations: what is kept, who finds it, and what responses take from it and add to it."""

import openai
import pytest

from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

BASE = "/v1/conversations"
GREEDY = {"temperature": 0, "max_output_tokens": 4, "ignore_eos": True, "store": False}


def says(text: str, role: str = "user") -> dict:
    return {"type": "message", "role": role, "content": text}


def texts(items: list[dict]) -> list[str]:
    return [part["text"] for item in items for part in item["content"]]


async def test_openais_client_keeps_a_conversation(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        made = await client.conversations.create(items=[says("One")], metadata={"topic": "a"})
        assert made.metadata == {"topic": "a"}
        assert (await client.conversations.retrieve(made.id)).created_at == made.created_at
        assert (await client.conversations.update(made.id, metadata={"topic": "b"})).metadata == {"topic": "b"}
        added = await client.conversations.items.create(made.id, items=[says("Two"), says("Three", "assistant")])
        assert [item.content[0].type for item in added.data] == ["input_text", "output_text"]
        listed = await client.conversations.items.list(made.id, limit=2, order="asc")
        assert [item.content[0].text for item in listed.data] == ["One", "Two"]
        assert [item.content[0].text async for item in listed] == ["One", "Two", "Three"]
        first = listed.data[0].id
        assert (await client.conversations.items.retrieve(first, conversation_id=made.id)).content[0].text == "One"
        await client.conversations.items.delete(first, conversation_id=made.id)
        left = await client.conversations.items.list(made.id)
        assert [item.content[0].text for item in left.data] == ["Three", "Two"]
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)
        await client.close()


@pytest.mark.parametrize("how", ["whole", "stream", "background"])
async def test_a_response_goes_on_from_its_conversation_and_is_added_to_it(tiny_engine, how):
    fields = {
        "whole": {},
        "stream": {"stream": True},
        "background": {"background": True, "store": True, "stream": True},
    }[how]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        name = (await client.post(BASE, json={"items": [says("One")]})).json()["id"]
        answer = await client.post("/v1/responses", json=GREEDY | {"input": "Two", "conversation": name} | fields)
        assert answer.status_code == 200, answer.text

        whole = (await client.get(f"{BASE}/{name}/items", params={"order": "asc"})).json()["data"]
        assert texts(whole)[:2] == ["One", "Two"]
        body = GREEDY | {"input": [*whole, says("More")]}
        asked = {"input": "More", "conversation": {"id": name}}
        by_name, spelt = [(await client.post("/v1/responses", json=one)).json() for one in (GREEDY | asked, body)]
        counted = (await client.post("/v1/responses/input_tokens", json={"input": "", "conversation": name})).json()
    assert by_name["conversation"] == {"id": name}
    assert by_name["usage"]["input_tokens"] == spelt["usage"]["input_tokens"]
    assert texts(by_name["output"]) == texts(spelt["output"])
    assert counted["input_tokens"] > by_name["usage"]["input_tokens"]


async def test_another_key_finds_no_conversation(tiny_engine):
    async with (
        tiny_engine() as engine,
        running_server(engine, server_config(api_key=("one", "two"))) as served,
        served.client(key="one") as one,
        served.client(key="two") as two,
    ):
        name = (await one.post(BASE, json={"items": [says("One")]})).json()["id"]
        (item,) = (await one.get(f"{BASE}/{name}/items")).json()["data"]
        answers = [
            await two.get(f"{BASE}/{name}"),
            await two.post(f"{BASE}/{name}", json={"metadata": {}}),
            await two.get(f"{BASE}/{name}/items"),
            await two.post(f"{BASE}/{name}/items", json={"items": [says("x")]}),
            await two.get(f"{BASE}/{name}/items/{item['id']}"),
            await two.delete(f"{BASE}/{name}/items/{item['id']}"),
            await two.delete(f"{BASE}/{name}"),
            await two.post("/v1/responses", json=GREEDY | {"input": "x", "conversation": name}),
            await one.get(f"/v1/responses/{name}"),
            await one.delete(f"/v1/responses/{name}"),
        ]
        assert [answer.status_code for answer in answers] == [404] * 10
        codes = {answer.json()["error"]["code"] for answer in answers}
        assert codes == {"conversation_not_found", "response_not_found"}
        previous = await one.post("/v1/responses", json=GREEDY | {"input": "x", "previous_response_id": name})
        assert previous.json()["error"]["code"] == "previous_response_not_found"
        assert texts((await one.get(f"{BASE}/{name}/items")).json()["data"]) == ["One"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [says("x")] * 10_001}, "items"),
        ("", {"items": "x"}, "items"),
        ("", {"items": [says("x" * 3000)]}, "items"),
        ("", {"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ("/NAME", {}, "metadata"),
        ("", {"items": [says("x"), {"type": "item_reference", "id": "msg_1"}]}, "items[1]"),
        ("/NAME/items", {"items": [{"id": "msg_1"}]}, "items[0]"),
        ("/NAME/items", {"items": []}, "items"),
        ("/NAME/items", {"items": [says("x" * 3000)]}, "items"),
    ],
)
async def test_wrong_conversations_are_refused_by_name(tiny_engine, path, body, param):
    config = server_config(responses_store_bytes=2000)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        name = (await client.post(BASE, json={})).json()["id"]
        answer = await client.post(BASE + path.replace("NAME", name), json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_a_conversation_without_room_for_an_answer_stays_as_it_was(tiny_engine):
    config = server_config(responses_store_bytes=1000)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        name = (await client.post(BASE, json={"items": [says("x" * 700)]})).json()["id"]
        answer = await client.post("/v1/responses", json=GREEDY | {"input": "y" * 400, "conversation": name})
        items = (await client.get(f"{BASE}/{name}/items")).json()["data"]
    assert (answer.status_code, answer.json()["conversation"]) == (200, None)
    assert answer.headers["x-troupellm-skipped"] == "turn conversation"
    assert len(items) == 1


async def test_items_of_a_conversation_have_ids_of_their_own(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        name = (await client.post(BASE, json={})).json()["id"]
        kept = GREEDY | {"store": True, "conversation": name}
        first = (await client.post("/v1/responses", json=kept | {"input": [says("One") | {"id": "mine"}]})).json()
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        again = [says("Two") | {"id": "mine"}, reference]
        assert (await client.post("/v1/responses", json=kept | {"input": again})).status_code == 200
        items = (await client.get(f"{BASE}/{name}/items", params={"order": "asc"})).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant", "assistant"]
    assert len({item["id"] for item in items}) == 5
    assert items[1]["content"] == items[3]["content"]


async def test_a_compaction_takes_the_place_of_the_items_before_it(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        name = (await client.post(BASE, json={"items": [says("Rules", "system"), says("One")]})).json()["id"]
        body = {"input": [{"type": "compaction_trigger"}], "conversation": name, "temperature": 0}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        items = (await client.get(f"{BASE}/{name}/items", params={"order": "asc"})).json()["data"]
    assert [item.get("role", item["type"]) for item in items] == ["system", "compaction"]


async def test_a_conversation_and_a_previous_response_exclude_each_other(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        body = {"input": "x", "conversation": "conv_a", "previous_response_id": "resp_a"}
        answer = await client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conversation")


async def test_conversations_are_kept_within_the_bounds_of_responses(tiny_engine):
    config = server_config(responses_store_entries=2)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        names = [(await client.post(BASE, json={})).json()["id"] for _ in range(3)]
        found = [(await client.get(f"{BASE}/{name}")).status_code for name in names]
        metrics = (await client.get("/metrics")).text
    assert found == [404, 200, 200]
    assert "troupellm_responses_stored 2.0" in metrics


async def test_without_a_store_conversations_are_refused(tiny_engine):
    config = server_config(responses_store_entries=0)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        answers = [
            await client.post(BASE, json={}),
            await client.post("/v1/responses", json={"input": "x", "conversation": "conv_a"}),
        ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all("--responses-store-entries" in answer.json()["error"]["message"] for answer in answers)


async def test_a_conversation_at_its_bound_says_how_to_go_on_and_goes_on(tiny_engine):
    config = server_config(max_body_bytes=2_000)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        name = (await client.post(BASE, json={"items": [says("x" * 1_000)]})).json()["id"]
        more = await client.post(f"{BASE}/{name}/items", json={"items": [says("y" * 500)]})
        assert more.status_code == 200, more.text
        asked = GREEDY | {"input": "z" * 200, "conversation": name}
        full = await client.post("/v1/responses", json=asked)
        error = full.json()["error"]
        assert (full.status_code, error["param"], error["code"]) == (400, "conversation", "request_too_large")
        items = (await client.get(f"{BASE}/{name}/items", params={"order": "asc"})).json()["data"]
        path = f"{BASE}/{name}/items/{items[0]['id']}"
        assert "DELETE /v1/conversations/{conversation_id}/items/{item_id}" in error["message"]
        assert (await client.delete(path)).status_code == 200
        answer = await client.post("/v1/responses", json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["conversation"] == {"id": name}


async def test_responses_at_the_bound_go_on_from_an_earlier_one(tiny_engine):
    config = server_config(max_body_bytes=8_000)
    asked = GREEDY | {"store": True, "input": "x" * 600}
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        names: list[str] = []
        for _ in range(10):
            answer = await client.post("/v1/responses", json=asked | {"previous_response_id": (names or [None])[-1]})
            if answer.status_code != 200:
                break
            names.append(answer.json()["id"])
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "previous_response_id", "request_too_large")
        assert "continue an earlier response" in error["message"]
        earlier = await client.post("/v1/responses", json=asked | {"previous_response_id": names[0]})
        assert earlier.status_code == 200, earlier.text
