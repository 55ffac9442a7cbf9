"""The further sampling options: the same tokens on every path, and what clients get to see of them."""

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from tokenizers import pre_tokenizers

from troupellm import Engine
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.errors import InvalidRequest, RequestFailed
from troupellm.protocol.messages.input import TextPrompt, Truncation
from troupellm.protocol.messages.worker import StepPlan
from troupellm.protocol.params.sampling_checks import RepetitionDetection, ThinkingMarks
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.servers.serving import events_of, running_server, server_config, with_spare
from troupellm.tests.support.workers.meddler import WorkerHosts
from troupellm.tests.support.workers.plug_ins import MODULE as PLUG_IN_MODULE

pytestmark = pytest.mark.anyio

PLUG_INS = (f"only={PLUG_IN_MODULE}:OnlyToken", f"broken={PLUG_IN_MODULE}:Broken")
END = "</t>"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""By token id, in the tiny model's tokenizer."""
MARKS = ThinkingMarks(start="<t>", end=END, open=True)
ASKS: dict[str, dict[str, Any]] = {
    "a budget": {"temperature": 0.0, "thinking_token_budget": 5, "thinking": MARKS},
    "drawn budgets": {"seed": 3, "temperature": 1.2, "n": 3, "thinking_token_budget": 2, "thinking": MARKS},
    "repetition": {
        "seed": 5, "allowed_token_ids": [65, 66], "logit_bias": {65: 5.0},
        "repetition_detection": RepetitionDetection(max_pattern_size=4, min_count=5), "max_tokens": 60,
    },
    "a plug-in": {"temperature": 0.0, "n": 2, "logits_processors": {"only": {"token": 70, "after": 4}}},
    "a plug-in by its argument": {"seed": 6, "extra_args": {"token": 71}, "max_tokens": 5},
    "listed": {"temperature": 0.0, "logprob_token_ids": [200, 3], "logprobs": 0},
    "plain": {"temperature": 0.0},
}  # fmt: skip


def said(token_ids: Any) -> str:
    return "".join([LETTERS[token_id] for token_id in token_ids]).replace("Ġ", " ")


def prompt(name: str) -> list[int]:
    return [30 + list(ASKS).index(name), *range(9, 21), 3]


async def asked(engine: Any, name: str) -> list[tuple[Any, ...]]:
    """Tokens, text, end and log-probabilities of every choice."""
    options = {"max_tokens": 24, "ignore_eos": True} | ASKS[name]
    completion = await engine.generate(prompt(name), **options)
    return [
        (
            choice.token_ids,
            choice.text,
            choice.finish_reason,
            [[(top.token_id, top.rank) for top in entry.top] for entry in choice.logprobs or ()],
        )
        for choice in completion.choices
    ]


async def asked_together(engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def ask(name: str) -> None:
        found[name] = await asked(engine, name)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for name in ASKS:
                group.start_soon(ask, name)
    return found


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> dict[str, Any]:
    """Each alone, one plan at a time."""

    async def run() -> dict[str, Any]:
        settings = SETTINGS | {"logits_processors": PLUG_INS, "async_scheduling": False}
        async with Engine(checkpoint, **settings) as engine:
            return {name: await asked(engine, name) for name in ASKS}

    return anyio.run(run)


def test_each_does_what_it_says(solo: dict[str, Any]) -> None:
    tokens, text, _, _ = solo["a budget"][0]
    assert (said(tokens[5:9]), text.count(END)) == (END, 1)
    assert [said(choice[0][2:6]) for choice in solo["drawn budgets"]] == [END] * 3
    assert len({choice[0] for choice in solo["drawn budgets"]}) == 3
    tokens, _, reason, _ = solo["repetition"][0]
    assert reason == "repetition"
    assert any(tokens[-5 * size :] == tokens[-size:] * 5 for size in range(1, 5))
    assert [choice[0][4:] for choice in solo["a plug-in"]] == [(70,) * 20] * 2
    assert solo["a plug-in"][0][0][:4] != (70,) * 4
    assert solo["a plug-in by its argument"][0][0] == (71,) * 5
    entries = solo["listed"][0][3]
    assert [[token for token, _ in entry] for entry in entries] == [[200, 3]] * 24
    assert all(rank >= 2 or token in solo["listed"][0][0] for entry in entries for token, rank in entry)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_plans_in_flight": 2},
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 26, "block_size": 4, "enable_prefix_caching": False},
    ],
    ids=["together", "chunked", "preempted"],
)
async def test_the_same_in_a_crowd(tiny_engine, solo, settings):
    async with tiny_engine(logits_processors=PLUG_INS, max_model_len=96, **settings) as engine:
        assert await asked_together(engine) == solo
        assert ("num_gpu_blocks_override" in settings) == (engine.snapshot().scheduler.preemptions > 0)


async def test_the_same_from_a_worker_that_dies_now_and_then(tiny_engine, solo):
    hosts, steps = WorkerHosts(), [0]

    def die_now_and_then(plan: StepPlan) -> None:
        steps[0] += 1
        if steps[0] % 10 == 0:
            raise WorkerGone("somebody killed it", fault=False)

    async with tiny_engine(worker=hosts, logits_processors=PLUG_INS) as engine:
        hosts.worker.on_launch = die_now_and_then
        assert await asked_together(engine) == solo
        assert engine.snapshot().scheduler.replays > 0


@pytest.mark.slow
@pytest.mark.parametrize("spare", [False, True])
async def test_the_same_from_a_worker_process_also_after_its_death(checkpoint, solo, monkeypatch, spare):
    settings = SETTINGS | {"logits_processors": PLUG_INS, "worker_process": True, "spare_worker": spare}
    async with Engine(checkpoint, **settings) as engine:
        if spare:
            await with_spare(engine)
        assert await asked_together(engine) == solo
        async with anyio.create_task_group() as group:
            found: dict[str, Any] = {}

            async def ask() -> None:
                found.update(await asked_together(engine))

            async with engine.stream([9, 8, 7], max_tokens=200, temperature=0.0, ignore_eos=True) as stream:
                group.start_soon(ask)
                for _ in range(6):
                    await anext(stream)
                os.kill(engine.snapshot().worker_pid, signal.SIGKILL)
                assert len([delta async for delta in stream]) > 0
        assert found == solo
        assert engine.snapshot().scheduler.worker_losses == 1


async def test_the_same_through_a_front(tiny_engine, solo):
    async with tiny_engine(logits_processors=PLUG_INS) as engine, front_pair(engine) as pair:
        assert await asked_together(pair.remote) == solo


async def test_refusals_name_the_field_on_either_side_of_a_front(tiny_engine):
    wrong = {
        "logits_processors": {"nobody": {}},
        "extra_args": {"nobody": 1},
        "thinking_token_budget": 3,
    }
    async with tiny_engine(logits_processors=PLUG_INS) as engine, front_pair(engine) as pair:
        for door in (engine, pair.remote):
            for field, value in wrong.items():
                with pytest.raises(InvalidRequest) as caught:
                    await door.generate([5], max_tokens=2, **{field: value})
                assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
            with pytest.raises(InvalidRequest, match="only: token must be") as caught:
                await door.generate([5], max_tokens=2, logits_processors={"only": {"token": "x"}})
            assert caught.value.param == "logits_processors"
            with pytest.raises(RequestFailed, match="broken failed"):
                await door.generate([5], max_tokens=2, logits_processors={"broken": {"how": "raise"}})
            assert (await door.generate([5], max_tokens=2)).token_ids


async def test_a_default_plug_in_has_every_request_but_a_beam_search(tiny_engine):
    settings = {"logits_processors": PLUG_INS, "default_logits_processors": ('only={"token": 70, "after": 1}',)}
    async with tiny_engine(**settings) as engine, front_pair(engine) as pair:
        for door in (engine, pair.remote):
            plain = await door.generate([5], max_tokens=3, ignore_eos=True, temperature=0.0)
            asked = {"only": {"token": 71}}
            own = await door.generate([5], max_tokens=3, ignore_eos=True, logits_processors=asked)
            by_argument = await door.generate([5], max_tokens=3, ignore_eos=True, extra_args={"token": 72})
            beams = await door.generate([5], max_tokens=3, ignore_eos=True, use_beam_search=True, n=2, temperature=0.0)
            assert (plain.token_ids[0] != 70, plain.token_ids[1:]) == (True, (70, 70))
            assert own.token_ids[1:] == (71, 71), "the rest of the default's arguments holds"
            assert by_argument.token_ids[1:] == (72, 72)
            assert beams.token_ids[1:] != (70, 70)


# Over HTTP.


async def posted(served: Any, path: str, body: dict[str, Any]) -> Any:
    async with served.client() as client:
        return await client.post(path, json={"model": "tiny", "max_tokens": 8, "temperature": 0} | body)


async def test_an_error_before_the_first_token_is_a_real_status(tiny_engine):
    async with tiny_engine(logits_processors=PLUG_INS) as engine, running_server(engine) as served:
        for stream in (False, True):
            for route, body in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/completions", {"prompt": ["x", "y"]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
            ):
                failed = await posted(
                    served,
                    route,
                    body | {"stream": stream, "logits_processors": [{"name": "broken", "args": {"how": "raise"}}]},
                )
                assert failed.status_code == 500, failed.text
                assert failed.json()["error"]["code"] == "engine_request_failed"
                assert "secret" not in failed.text
                refused = await posted(served, route, body | {"stream": stream, "logits_processors": {"only": {}}})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logits_processors")


async def test_per_token_events_and_wider_ones(tiny_engine):
    body = {"prompt": "Hi", "stream": True, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}

    async def sizes(served: Any, **extra: Any) -> list[int]:
        response = await posted(served, "/v1/completions", body | extra)
        return [len(event["choices"][0].get("token_ids") or ()) for event in events_of(response.text)]

    async with tiny_engine(flush_interval=0.5) as engine, running_server(engine) as served:
        assert await sizes(served, stream_interval=1) == [1] * 24
        wide = await sizes(served, stream_interval=5)
        assert (wide[0], sum(wide)) == (1, 24)
        assert min(wide[1:-1]) >= 5
        assert len(wide) > 2
        assert len(await sizes(served)) <= 4
        refused = await posted(served, "/v1/completions", body | {"stream_interval": 0})
        assert refused.json()["error"]["param"] == "stream_interval"
    async with tiny_engine(stream_interval=4) as engine, running_server(engine) as served:
        assert min((await sizes(served, stream_interval=1))[1:-1]) >= 4
    options = {"max_tokens": 12, "ignore_eos": True, "stream_interval": 1}
    async with (
        tiny_engine(flush_interval=0.5) as engine,
        front_pair(engine) as pair,
        pair.remote.stream([5], **options) as stream,
    ):
        assert [len(delta.token_ids) async for delta in stream] == [1] * 12


async def test_truncation_cuts_either_end(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:

        async def kept(**extra: Any) -> str:
            body = {"prompt": "abcdefghij", "max_tokens": 1, "echo": True, "return_token_ids": True}
            answer = (await posted(served, "/v1/completions", body | extra)).json()
            choice, details = answer["choices"][0], answer["usage"]["prompt_tokens_details"]
            cut = len(choice["prompt_token_ids"]) < len(extra.get("prompt", "abcdefghij"))
            assert details.get("truncated") == (True if cut else None)
            assert said(choice["prompt_token_ids"]) == choice["text"][: len(choice["prompt_token_ids"])]
            return said(choice["prompt_token_ids"])

        assert await kept(truncate_prompt_tokens=4) == "ghij"
        assert await kept(truncate_prompt_tokens=4, truncation_side="right") == "abcd"
        assert await kept(truncate_prompt_tokens=40) == "abcdefghij"
        assert await kept(truncate_prompt_tokens=-1) == "abcdefghij"
        assert await kept(prompt=[LETTERS.index(letter) for letter in "abc"], truncate_prompt_tokens=2) == "bc"
        long = await posted(served, "/v1/completions", {"prompt": "x" * 50_000, "truncate_prompt_tokens": -1})
        assert long.json()["usage"]["prompt_tokens_details"]["truncated"] is True
        assert long.json()["usage"]["prompt_tokens"] == engine.limits.max_model_len - 8
        for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "left"}):
            refused = await posted(served, "/v1/completions", {"prompt": "x"} | wrong)
            assert refused.json()["error"]["param"] == next(iter(wrong))
        chat = {"messages": [{"role": "user", "content": "y" * 50_000}], "truncate_prompt_tokens": 7}
        usage = (await posted(served, "/v1/chat/completions", chat)).json()["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["truncated"]) == (7, True)
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        for route, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x" * 9})):
            asked = body | streamed | {"truncate_prompt_tokens": 7}
            last = events_of((await posted(served, route, asked)).text)[-1]
            assert last["usage"]["prompt_tokens_details"]["truncated"] is True
        async with front_pair(engine) as pair:
            for length, cut in ((4, False), (5, True)):
                text = TextPrompt("a" * length, truncation=Truncation(4))
                completion = await pair.remote.generate(text, max_tokens=1)
                assert (completion.usage.prompt_tokens, completion.usage.truncated) == (4, cut)


def joined(events: list[dict[str, Any]]) -> dict[str, str]:
    """The message of a streamed answer of one choice."""
    deltas = [event["choices"][0]["delta"] for event in events]
    return {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")}


async def test_thinking_has_a_budget(tiny_engine):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n"
    budget = {"thinking_token_budget": 6, "max_tokens": 30, "ignore_eos": True, "n": 2, "seed": 1, "temperature": 1}
    chat = {"messages": [{"role": "user", "content": "x"}]} | budget
    async with (
        tiny_engine(chat_template=template, reasoning_parser="deepseek_r1") as engine,
        running_server(engine) as served,
    ):
        whole = (await posted(served, "/v1/chat/completions", chat)).json()
        free = (await posted(served, "/v1/chat/completions", chat | {"thinking_token_budget": -1})).json()
        events = events_of((await posted(served, "/v1/chat/completions", chat | {"stream": True})).text)
        for index, choice in enumerate(whole["choices"]):
            deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == index]
            for field in ("reasoning", "content"):
                assert "".join(delta.get(field) or "" for delta in deltas) == choice["message"][field]
            assert free["choices"][index]["message"]["reasoning"].startswith(choice["message"]["reasoning"][:-1])
            assert choice["message"]["content"]
            assert not free["choices"][index]["message"]["content"]
        guided = chat | {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False, "n": 1}
        for stream in (False, True):
            answer = await posted(served, "/v1/chat/completions", guided | {"stream": stream})
            message = answer.json()["choices"][0]["message"] if not stream else joined(events_of(answer.text))
            assert message["content"].strip() in ("yes", "no")
            assert message["reasoning"]
        text = {"prompt": "<think>"} | budget | {"echo": True}
        for choice in (await posted(served, "/v1/completions", text)).json()["choices"]:
            assert choice["text"].count("</think>") == 1
        nothing = {"prompt": "no thoughts here"} | budget
        for choice in (await posted(served, "/v1/completions", nothing)).json()["choices"]:
            assert "</think>" not in choice["text"]


async def test_echo_names_and_ids_on_chat(tiny_engine):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "echo": True,
        "request_id": "mine.7",
        "logprobs": True,
        "top_logprobs": 1,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
    }
    async with tiny_engine() as engine, running_server(engine) as served:
        whole = (await posted(served, "/v1/chat/completions", body)).json()
        plain = (await posted(served, "/v1/chat/completions", body | {"echo": False})).json()
        events = events_of((await posted(served, "/v1/chat/completions", body | {"stream": True})).text)
        assert whole["id"] == "chatcmpl-mine.7" == events[0]["id"]
        content = whole["choices"][0]["message"]["content"]
        assert content == "Well" + plain["choices"][0]["message"]["content"]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == content
        entries = whole["choices"][0]["logprobs"]["content"]
        assert all(entry["token"].startswith("token_id:") for entry in entries)
        assert entries[0]["top_logprobs"][0]["token"].startswith("token_id:")
        legacy = {"prompt": "Hi", "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
        legacy = (await posted(served, "/v1/completions", legacy)).json()["choices"][0]["logprobs"]
        assert legacy["tokens"][:2] == [f"token_id:{LETTERS.index(letter)}" for letter in "Hi"]
        assert all(name.startswith("token_id:") for table in legacy["top_logprobs"][1:] for name in table)


async def test_a_request_template_needs_the_servers_trust(tiny_engine):
    body = {
        "messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ messages[0].content }}{{ documents }}",
        "documents": [{"text": "x"}], "return_token_ids": True,
    }  # fmt: skip
    async with tiny_engine() as engine:
        async with running_server(engine) as served:
            refused = (await posted(served, "/v1/chat/completions", body)).json()["error"]
            assert (refused["param"], refused["code"]) == ("chat_template", "unsupported_parameter")
        async with running_server(engine, server_config(trust_request_chat_template=True)) as served:
            answer = (await posted(served, "/v1/chat/completions", body)).json()
            blind = body | {"chat_template": "{{ messages[0].content }}{# documents #}"}
            refused = (await posted(served, "/v1/chat/completions", blind)).json()["error"]
            assert (refused["param"], refused["code"]) == ("documents", "unsupported_parameter")
            assert said(answer["prompt_token_ids"]) == "Hi[{'text': 'x'}]"
            tokens = (await posted(served, "/tokenize", body)).json()["tokens"]
            assert tokens == answer["prompt_token_ids"]
            for template in ("{% for", "{{ cycler.__init__.__globals__ }}", "{% for i in range(10**9) %}x{% endfor %}"):
                broken = await posted(served, "/v1/chat/completions", body | {"chat_template": template})
                assert broken.status_code == 400, broken.text


async def test_operators_change_defaults_and_cap_answers(tiny_engine):
    settings = {"generation_config": "vllm", "override_generation_config": '{"max_new_tokens": 5, "temperature": 0}'}
    async with tiny_engine(**settings, logprobs_mode="raw_logits") as engine, running_server(engine) as served:
        body = {"prompt": "Hi", "max_tokens": 50, "ignore_eos": True, "temperature": None, "logprobs": 1}
        first, again = [(await posted(served, "/v1/completions", body)).json() for _ in range(2)]
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert first["usage"]["completion_tokens"] == 5
        assert (
            max(first["choices"][0]["logprobs"]["token_logprobs"]) > 0
        )  # no probability is above one: these are logits
