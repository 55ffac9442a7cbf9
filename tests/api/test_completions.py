import pytest

from troupellm.tests.support.servers.serving import events_of, running_server, server_config

pytestmark = pytest.mark.anyio

PROMPT = {"model": "tiny", "prompt": "Once", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


async def post(client, **fields):
    response = await client.post("/v1/completions", json=PROMPT | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_text_and_its_tokens_are_the_same_prompt(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        text = await post(client)
        ids = engine.tokenizer.encode("Once", add_special_tokens=True)
        tokens = await post(client, prompt=ids)
    assert text["object"] == "text_completion"
    assert text["choices"][0]["text"] == tokens["choices"][0]["text"]
    assert text["choices"][0]["finish_reason"] == "length"
    assert text["usage"]["prompt_tokens"] == len(ids)


async def test_many_prompts_times_n_have_ordered_indices(tiny_engine):
    fields = {"prompt": ["Once", "Twice", "Thrice"], "n": 2, "return_token_ids": True, "temperature": 1, "seed": 3}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        whole = await post(client, **fields)
        events = events_of((await client.post("/v1/completions", json=PROMPT | fields | {"stream": True})).text)
        alone = await post(client, **(fields | {"prompt": "Twice"}))
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    streamed: dict[int, list[int]] = {index: [] for index in range(6)}
    prompts: dict[int, list[list[int] | None]] = {index: [] for index in range(6)}
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["token_ids"]
        prompts[event["choices"][0]["index"]].append(event["choices"][0].get("prompt_token_ids"))
    for choice in whole["choices"]:  # once, and first
        first, *others = prompts[choice["index"]]
        assert first == choice["prompt_token_ids"]
        assert not any(others)
    assert streamed == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    assert [choice["text"] for choice in whole["choices"][2:4]] == [choice["text"] for choice in alone["choices"]]
    assert whole["usage"]["completion_tokens"] == 36


async def test_streamed_text_is_the_whole_text(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        whole = await post(client, max_tokens=40)
        response = await client.post("/v1/completions", json=PROMPT | {"max_tokens": 40, "stream": True})
        events = events_of(response.text)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_echo_with_legacy_logprobs_covers_prompt_and_answer(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        echoed = (await post(client, echo=True, logprobs=2))["choices"][0]
        plain = (await post(client, logprobs=2))["choices"][0]
        stream = await client.post("/v1/completions", json=PROMPT | {"echo": True, "logprobs": 2, "stream": True})
        events = events_of(stream.text)
    assert echoed["text"] == "Once" + plain["text"]
    logprobs = echoed["logprobs"]
    assert logprobs["tokens"][:4] == ["O", "n", "c", "e"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert logprobs["tokens"][4:] == plain["logprobs"]["tokens"]
    assert plain["logprobs"]["text_offset"][0] == 0
    assert [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]] == logprobs["tokens"]
    offsets = [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


async def test_legacy_logprobs_count_characters_of_the_returned_text(tiny_engine):
    """The tiny model makes many bytes that are no characters."""
    wanted = {"max_tokens": 60, "temperature": 1.0, "seed": 4, "logprobs": 5, "echo": True, "prompt": "Ünce 日"}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        choice = (await post(client, **wanted))["choices"][0]
        stream = await client.post("/v1/completions", json=PROMPT | wanted | {"stream": True})
        ids = (await post(client, **wanted, return_token_ids=True))["choices"][0]
        raws = [engine.tokenizer.token_bytes(i) for i in (*ids["prompt_token_ids"], *ids["token_ids"])]
    logprobs, text = choice["logprobs"], choice["text"]
    assert any(name.startswith("bytes:") for name in logprobs["tokens"])
    whole = 0
    for name, offset, raw in zip(logprobs["tokens"], logprobs["text_offset"], raws, strict=True):
        if not name.startswith(("bytes:", "token_id:", "<|")):
            assert text[offset:].startswith(raw.decode())
            whole += 1
    assert whole > 3
    for name, value, table in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert table[name] == value
        assert len(table) in (5, 6)
    streamed = [event["choices"][0]["logprobs"] for event in events_of(stream.text)]
    assert [offset for part in streamed if part for offset in part["text_offset"]] == logprobs["text_offset"]


async def test_scoring_gives_the_prompt_alone(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        scored = await post(client, echo=True, logprobs=0, max_tokens=0)
        fields = {"echo": True, "max_tokens": 0, "return_token_ids": True}
        shown = (await post(client, **fields))["choices"][0]
        events = events_of((await client.post("/v1/completions", json=PROMPT | fields | {"stream": True})).text)
        refused = await client.post("/v1/completions", json=PROMPT | {"max_tokens": 0})
    assert scored["choices"][0]["text"] == "Once"
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 4
    assert scored["usage"]["completion_tokens"] == 0
    assert refused.json()["error"]["param"] == "max_tokens"
    assert (shown["text"], shown["token_ids"], len(shown["prompt_token_ids"])) == ("Once", [], 4)
    streamed = [event["choices"][0] for event in events]
    assert [(choice["text"], choice.get("prompt_token_ids")) for choice in streamed if choice["text"]] == [
        ("Once", shown["prompt_token_ids"])
    ]
    assert not any(choice.get("token_ids") for choice in streamed)


async def test_usage_so_far_is_that_of_the_whole_call(tiny_engine):
    wanted = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        many = await client.post("/v1/completions", json=PROMPT | wanted | {"prompt": ["Once", "Twice"]})
        scored = await client.post("/v1/completions", json=PROMPT | wanted | {"echo": True, "max_tokens": 0})
    for answer, prompt, generated in ((many, 9, 12), (scored, 4, 0)):
        *running, last = [event["usage"] for event in events_of(answer.text)]
        assert (last["prompt_tokens"], last["completion_tokens"]) == (prompt, generated)
        assert {usage["prompt_tokens"] for usage in running} == {prompt}
        assert max(usage["completion_tokens"] for usage in running) == generated


async def test_prompt_logprobs_are_tables_by_token_id(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        choice = (await post(client, prompt_logprobs=1))["choices"][0]
        streamed = await client.post("/v1/completions", json=PROMPT | {"prompt_logprobs": 1, "stream": True})
        none = await client.post("/v1/completions", json=PROMPT | {"prompt_logprobs": 0, "stream": True})
    assert choice["prompt_logprobs"][0] is None
    assert all(
        set(entry) >= {"logprob", "rank", "decoded_token"}
        for row in choice["prompt_logprobs"][1:]
        for entry in row.values()
    )
    assert streamed.json()["error"]["param"] == "prompt_logprobs"
    assert "".join(event["choices"][0]["text"] for event in events_of(none.text)) == choice["text"]


async def test_stop_string_ends_the_text_and_is_named(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        whole = (await post(client, max_tokens=40))["choices"][0]["text"]
        stop = next(letter for letter in whole[5:] if letter.isascii() and letter.isprintable())
        stopped = (await post(client, max_tokens=40, stop=[stop]))["choices"][0]
        events = events_of(
            (await client.post("/v1/completions", json=PROMPT | {"max_tokens": 40, "stop": stop, "stream": True})).text
        )
    assert stopped["text"] == whole.partition(stop)[0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert "".join(event["choices"][0]["text"] for event in events) == stopped["text"]


async def test_too_many_prompts_and_suffix_are_refused(tiny_engine):
    config = server_config(max_prompts=2)
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        many = await client.post("/v1/completions", json=PROMPT | {"prompt": ["a", "b", "c"]})
        suffix = await client.post("/v1/completions", json=PROMPT | {"suffix": "end"})
    assert many.json()["error"]["param"] == "prompt"
    assert "2" in many.json()["error"]["message"]
    assert suffix.json()["error"]["param"] == "suffix"
