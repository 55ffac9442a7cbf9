"""Rows B1 to B8 and B12 of the fault table: bad parameters, on chat and completions, streamed and not."""

import pytest

from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH, VOCABULARY
from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.matrix import OK, check_matrix

pytestmark = pytest.mark.anyio

CHAT = ("/v1/chat/completions",)
COMPLETIONS = ("/v1/completions",)


async def test_B1_a_wrong_number_of_answers_is_refused(tiny_engine):
    cases = [({"n": value}, "n") for value in (0, -1, 1.5, 1.0, "2", True, [], 65, 10**9, 2**63, 2**70)]
    cases += [({"best_of": value}, "best_of") for value in (0, -1, 1.5, "2", True, 10**9, 2**63)]
    cases += [({"n": 2, "best_of": 1}, "best_of"), ({"n": None}, OK), ({"n": 2, "best_of": 2}, OK), ({"n": 64}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases)


async def test_B2_an_integer_out_of_range_is_refused_by_name(tiny_engine):
    fields = ("max_tokens", "min_tokens", "seed", "top_k", "priority")
    cases = [({field: value}, field) for field in fields for value in (1.5, 1.0, "10", True, [], {}, 2**64)]
    cases += [({"max_tokens": value}, "max_tokens") for value in (0, -1, 2**53 + 1)]
    cases += [({"min_tokens": value}, "min_tokens") for value in (-1, 3, 2**53 + 1)]
    cases += [({"top_k": value}, "top_k") for value in (-2, 2**53 + 1)]
    cases += [({"priority": 2**53 + 1}, "priority")]
    cases += [({field: None}, OK) for field in ("min_tokens", "seed", "top_k", "priority")]
    cases += [({"seed": value}, OK) for value in (0, -1, 2**53 + 1, 2**63 - 1)]
    cases += [({"top_k": value}, OK) for value in (-1, 0, 1)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases)


async def test_B2_a_wrong_max_completion_tokens_is_refused(tiny_engine):
    name = "max_completion_tokens"
    values = (0, -1, 1.5, 1.0, "10", True, 2**53 + 1)
    cases = [({"max_tokens": None, name: value}, name) for value in values]
    cases += [({"max_tokens": None, name: 2, "min_tokens": 2}, OK), ({name: None}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, routes=CHAT)


async def test_B3_a_number_out_of_range_is_refused_by_name(tiny_engine):
    ranges = {
        "temperature": (-0.1, 2.1),
        "top_p": (-0.1, 0, 1.1),
        "min_p": (-0.1, 1.1),
        "presence_penalty": (-2.1, 2.1),
        "frequency_penalty": (-2.1, 2.1),
        "repetition_penalty": (-1, 0, 1001),
    }
    cases = [({field: value}, field) for field, values in ranges.items() for value in (*values, -1e308, 1e308)]
    cases += [({field: value}, field) for field in ranges for value in ("1", True, [], "NaN")]
    cases += [({"temperature": value}, OK) for value in (-0.0, 1e-320, 0, 2, None)]
    cases += [({field: None}, OK) for field in ranges]
    cases += [({"min_p": value}, OK) for value in (-0.0, 1e-320, 1)]
    cases += [({"top_p": 1e-320}, OK), ({"repetition_penalty": 1e-320}, OK), ({"presence_penalty": -0.0}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases)


async def test_B3_refusals_name_the_range(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        body = {"model": "tiny", "prompt": "x", "temperature": 2.5}
        error = (await attacked.client.post("/v1/completions", json=body)).json()["error"]
    assert "[0, 2]" in error["message"]


async def test_B4_completions_refuse_wrong_logprobs(tiny_engine):
    wrong = (-1, 21, 10**9, LOGITS_WIDTH + 1, 1.5, "1", True)
    cases = [({"logprobs": value}, "logprobs") for value in wrong]
    cases += [({"logprobs": value}, OK) for value in (0, 20, None)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, routes=COMPLETIONS)


async def test_B4_chat_refuses_wrong_logprobs(tiny_engine):
    wrong = (-1, 21, 10**9, LOGITS_WIDTH + 1, 1.5, "1", True)
    cases = [({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in wrong]
    cases += [({"logprobs": value}, "logprobs") for value in (1, "yes", 0.5)]
    cases += [({"top_logprobs": 1}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 20}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, routes=CHAT)


async def test_B4_prompt_logprobs_with_a_cached_prompt_and_masked_tokens(tiny_engine):
    prompt = list(range(64))
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        first = (await attacked.client.post("/v1/completions", json=body | {"prompt_logprobs": 2})).json()
        again = (await attacked.client.post("/v1/completions", json=body | {"prompt_logprobs": 2})).json()
        masked = await attacked.client.post("/v1/completions", json=body | {"logprobs": 20, "allowed_token_ids": [7]})
        refused = await attacked.client.post("/v1/completions", json=body | {"prompt_logprobs": 21})
    tables = [answer["choices"][0]["prompt_logprobs"] for answer in (first, again)]
    assert len(tables[0]) == 64
    assert tables[0][0] is tables[1][0] is None
    for one, other in zip(*(table[1:] for table in tables), strict=True):  # other tiles where the canary is beside it
        assert {token: entry["rank"] for token, entry in one.items()} == {t: e["rank"] for t, e in other.items()}
        assert [entry["logprob"] for entry in one.values()] == pytest.approx(
            [e["logprob"] for e in other.values()], abs=1e-4
        )
    numbers = [value for table in masked.json()["choices"][0]["logprobs"]["top_logprobs"] for value in table.values()]
    assert all(-9999 <= value <= 0 for value in numbers)
    assert refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize(("entries", "sparse"), [(100_000, True), pytest.param(300_000, False, marks=pytest.mark.slow)])
async def test_B5_token_ids_are_checked_against_the_logits(tiny_engine, entries, sparse):
    assert LOGITS_WIDTH > VOCABULARY
    cases = []
    for field in ("allowed_token_ids", "stop_token_ids"):
        wrong = ([LOGITS_WIDTH], [-1], [2**31], [2**70], "1", 5, [0] * 70_000)
        cases += [({field: value}, field) for value in wrong]
        cases += [({field: value}, f"{field}[0]") for value in ([1.5], ["1"], [True], [None])]
        cases += [({field: [VOCABULARY - 1, LOGITS_WIDTH - 1, VOCABULARY]}, OK), ({field: None}, OK)]
    cases += [({"allowed_token_ids": []}, "allowed_token_ids"), ({"stop_token_ids": []}, OK)]
    wrong_bias = (
        {str(LOGITS_WIDTH): 1},
        {"-1": 1},
        {"x": 1},
        {"1.5": 1},
        {"1": 101},
        {"1": -101},
        {"1": "1"},
        {"1": True},
        {"1": None},
        {str(number): 1 for number in range(entries)},
        [1],
        "1",
    )
    cases += [({"logit_bias": value}, "logit_bias") for value in wrong_bias]
    cases += [({"logit_bias": {str(LOGITS_WIDTH - 1): 100, "0": -100}}, OK), ({"logit_bias": {}}, OK)]
    cases += [({"bad_words": [1]}, "bad_words[0]")]
    wrong_words = ([""], ["x" * 513], ["x"] * 129, "x" * 129, 5)
    cases += [({"bad_words": value}, "bad_words") for value in wrong_words]
    cases += [({"bad_words": ["a", "bc"]}, OK), ({"bad_words": []}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, sparse=sparse)


async def test_B6_a_wrong_prompt_is_refused(tiny_engine):
    wrong = (
        [],
        [[]],
        [[1], []],
        ["x"] * 100_000,
        [LOGITS_WIDTH],
        [-1],
        [2**40],
        [2**70],
        [1, "x"],
        [[1], "x"],
        [[1], 1],
        "",
    )
    cases = [({"prompt": value}, "prompt") for value in wrong]
    cases += [({"prompt": value}, OK) for value in ("x", [1, 2], ["x", "y"], [[1], [2, 3]], [VOCABULARY - 1])]
    typed = [
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [[1, "x"]]}, "prompt[0][1]"),
        ({"prompt": [[True]]}, "prompt[0][0]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
    ]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases + typed, routes=COMPLETIONS)


async def test_B7_a_wrong_stop_string_is_refused(tiny_engine):
    cases = [
        ({"stop": value}, "stop")
        for value in ("", [""], ["a", ""], ["x"] * 10_000, ["x"] * 17, "x" * 2**20, ["x" * 513], 5, True, {})
    ]
    cases += [({"stop": [1]}, "stop[0]"), ({"stop": [None]}, "stop[0]")]
    cases += [({"stop": value}, OK) for value in (None, [], "x", ["a", "ab", "b"], "é", "x" * 512)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases)


async def test_B7_text_never_contains_a_stop(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 60, "temperature": 1, "ignore_eos": True}
        for seed in range(5):
            whole = (await attacked.client.post("/v1/completions", json=body | {"seed": seed})).json()
            text = whole["choices"][0]["text"]
            stops = [text[20:23], text[21:24], text[30]]
            stopped = await attacked.client.post("/v1/completions", json=body | {"seed": seed, "stop": stops})
            shown = stopped.json()["choices"][0]["text"]
            assert text.startswith(shown)
            assert not any(stop in shown for stop in stops)


async def test_B8_a_wrong_message_is_refused_by_its_path(tiny_engine):
    user = {"role": "user", "content": "Hi"}
    cases = [
        ([], "messages"),
        ([user] * 10_001, "messages"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([user, {"role": "", "content": "x"}], "messages[1].role"),
        ([{"role": None, "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"a": 1}}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([5], "messages[0]"),
        ("x", "messages"),
        (None, "messages"),
        ([user, {"role": "assistant", "content": "So"}], OK),
        ([{"role": "user", "content": ""}], OK),
        ([{"role": "user", "content": []}], OK),
        ([user, {"role": "assistant", "content": None}, user], OK),
        ([user, {"role": "tool", "content": "x", "tool_call_id": "c1"}], OK),
        ([{"role": "wizard", "content": [5, {"type": "image_url"}]}, {"role": "assistant", "content": 5}, user], OK),
        ([{"role": role, "content": "x"} for role in ("system", "developer", "user")], OK),
    ]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, [({"messages": messages}, param) for messages, param in cases], routes=CHAT)


async def test_B8_a_hundred_thousand_messages(tiny_engine):
    messages = [{"role": "user", "content": "x"}] * 100_000
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, [({"messages": messages}, "messages")], routes=CHAT)


async def test_B12_an_unknown_model_is_not_found(tiny_engine):
    names = ("", "nobody", "../../x", "x" * 2**20, "a\x00b", "tiny/", "TINY", "/etc/passwd")
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, [({"model": name}, "model") for name in names], status=404)
        for path in ("/tokenize", "/detokenize"):
            body = {"prompt": "x", "tokens": [1], "model": "m" * 2**20}
            error = (await attacked.client.post(path, json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert error["message"].count("m") < 80
        for name in ("nobody", "..%2f..%2fx", "a%00b"):
            assert (await attacked.client.get(f"/v1/models/{name}")).status_code == 404
