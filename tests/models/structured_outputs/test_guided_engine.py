"""Guided requests through a whole engine: alone, in crowds, preempted, replayed, forked, with every other option."""

import json
import os
import re
import signal
from typing import Any

import anyio
import anyio.lowlevel
import jsonschema
import msgspec
import pytest

from troupellm import Engine, SamplingParams
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.worker import StepPlan
from troupellm.protocol.params.guide import EarlyEnd, GuideSpec
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.checkpoints.tiny_model import VOCABULARY
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.servers.serving import eventually, with_spare
from troupellm.tests.support.workers.meddler import WorkerHosts

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 8},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
GUIDES = (
    StructuredOutputsParams(json=SCHEMA).spec(),
    StructuredOutputsParams(regex="[a-z]{10,40}[0-9]{10,20}").spec(),
    StructuredOutputsParams(choice=["a very long choice indeed", "a short one", "another very long choice"]).spec(),
    StructuredOutputsParams(grammar='start: ("ab" | "cd" | /[x-z]{3}/)+ "!"').spec(),
    None,
)


def prompt(number: int) -> list[int]:
    return [40 + number, 41, 42 + number % 7]


def options(number: int) -> dict[str, Any]:
    guide = GUIDES[number % len(GUIDES)]
    return {"guide": guide, "temperature": 1.0, "seed": number, "max_tokens": 120, "ignore_eos": True}


async def solo(engine: Engine, count: int) -> list[tuple[int, ...]]:
    return [(await engine.generate(prompt(number), **options(number))).token_ids for number in range(count)]


async def crowd(engine: Engine, count: int, expected: list[tuple[int, ...]], attack: Any = None) -> None:
    """All at once; each must get what it got alone."""
    begun = 0

    async def one(number: int) -> None:
        nonlocal begun
        tokens: list[int] = []
        async with engine.stream(prompt(number), **options(number)) as stream:
            async for delta in stream:
                begun += not tokens
                tokens += delta.token_ids
        assert tuple(tokens) == expected[number]

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, number)
        if attack is not None:
            await eventually(lambda: begun >= count // 2)
            await attack()


async def test_a_crowd_gets_what_each_gets_alone(tiny_engine):
    async with tiny_engine() as engine:
        expected = await solo(engine, 15)
        await crowd(engine, 15, expected)


async def test_preempted_rows_go_on_in_their_grammar(tiny_engine):
    async with tiny_engine() as engine:
        expected = await solo(engine, 15)
    pool = {"num_gpu_blocks_override": 24, "block_size": 8, "kv_cache_memory_bytes": None, "max_model_len": 160}
    async with tiny_engine(**pool) as engine:
        await crowd(engine, 15, expected)
        assert engine.snapshot().scheduler.preemptions > 0


async def test_a_worker_that_dies_now_and_then_costs_no_token(tiny_engine):
    async with tiny_engine() as engine:
        expected = await solo(engine, 10)
    hosts, steps = WorkerHosts(), [0]

    def die_now_and_then(plan: StepPlan) -> None:
        steps[0] += 1
        if steps[0] % 10 == 0:
            raise WorkerGone("somebody killed it", fault=False)

    async with tiny_engine(worker=hosts) as engine:
        hosts.worker.on_launch = die_now_and_then
        await crowd(engine, 10, expected)
        assert engine.snapshot().scheduler.replays > 0


@pytest.mark.slow
@pytest.mark.parametrize("spare", [False, True])
async def test_a_killed_worker_costs_no_token(tiny_engine, spare):
    async with tiny_engine() as engine:
        expected = await solo(engine, 10)
    async with tiny_engine(worker_process=True, spare_worker=spare) as engine:
        if spare:
            await with_spare(engine)

        async def kill() -> None:
            os.kill(engine.snapshot().worker_pid, signal.SIGKILL)

        await crowd(engine, 10, expected, kill)
        assert engine.snapshot().scheduler.worker_losses == 1


async def test_n_answers_are_guided_one_by_one(tiny_engine):
    async with tiny_engine() as engine:
        for settings in ({"n": 6}, {"n": 2, "best_of": 5}):
            answer = await engine.generate(
                [5], guide=GUIDES[1], max_tokens=100, seed=1, temperature=1.5, ignore_eos=True, **settings
            )
            texts = [choice.text for choice in answer.choices]
            assert all(re.fullmatch("[a-z]{10,40}[0-9]{10,20}", text) for text in texts)
            assert len(set(texts)) == len(texts) == settings["n"]


async def test_logprobs_are_those_of_the_model(tiny_engine):
    async with tiny_engine() as engine:
        answer = await engine.generate([5], guide=GUIDES[2], max_tokens=50, seed=1, logprobs=3)
        choice = answer.choices[0]
        assert len(choice.logprobs) == len(choice.token_ids)
        plain = await engine.generate([5], max_tokens=1, seed=1, logprobs=3)
        assert choice.logprobs[0].top[0].logprob == plain.choices[0].logprobs[0].top[0].logprob


async def test_a_row_without_a_token_fails_alone(tiny_engine):
    async with tiny_engine() as engine, anyio.create_task_group() as group:
        ends: list[str] = []

        async def one(wanted: dict[str, Any]) -> None:
            try:
                ends.append((await engine.generate([5], guide=GUIDES[2], max_tokens=50, **wanted)).choices[0].text)
            except InvalidRequest as error:
                ends.append(f"{error.code}: {error.message}")

        group.start_soon(one, {})
        group.start_soon(one, {"allowed_token_ids": [VOCABULARY - 1]})
        group.start_soon(one, {"logit_bias": dict.fromkeys(range(5), -100)})
    dead = [end for end in ends if "no token is left to choose from: what the guide" in end]
    assert len(dead) == 1
    assert dead[0].startswith("invalid_schema: structured_outputs.choice: ")
    assert all(end in GUIDES[2].source for end in ends if end not in dead)


async def test_the_grammar_ends_the_answer_whatever_else_is_asked(tiny_engine):
    async with tiny_engine() as engine:
        for wanted in ({}, {"ignore_eos": True}, {"min_tokens": 40}, {"stop": ["indeed"]}, {"max_tokens": 200}):
            answer = await engine.generate([5], guide=GUIDES[2], seed=3, **{"max_tokens": 60} | wanted)
            choice = answer.choices[0]
            assert choice.finish_reason == "stop", wanted
            text = choice.text + (choice.stop_reason if isinstance(choice.stop_reason, str) else "")
            assert text in json.loads(GUIDES[2].source)


async def test_an_answer_cut_off_is_said_to_be(tiny_engine):
    async with tiny_engine() as engine:
        answer = await engine.generate([5], guide=GUIDES[1], max_tokens=5, seed=3)
        assert answer.choices[0].finish_reason == "length"


async def test_a_schema_holds_from_the_end_of_thinking_on(builtin_engine):
    guide = StructuredOutputsParams(json=SCHEMA).spec(after="</think>")
    async with builtin_engine() as engine:
        end = engine.tokenizer.encode("</think>", add_special_tokens=False)
        # The mark's tokens are made likely, so that the thought ends by itself at some point.
        bias = dict.fromkeys(end, 9.0)
        answer = await engine.generate("Hello <think>", guide=guide, max_tokens=600, seed=1, logit_bias=bias)
        text = answer.choices[0].text
        assert answer.choices[0].finish_reason == "stop"
        thought, _, rest = text.partition("</think>")
        assert thought
        jsonschema.validate(json.loads(rest), SCHEMA)


async def test_until_the_mark_the_answer_cannot_end_but_as_a_call_does(builtin_engine):
    guide = StructuredOutputsParams(regex="x").spec(after="<never generated>")
    async with builtin_engine() as engine:
        bias = dict.fromkeys(engine.tokenizer.eos_token_ids, 100.0)
        answer = await engine.generate("Hello", guide=guide, max_tokens=20, seed=1, logit_bias=bias)
        assert answer.choices[0].finish_reason == "length"
        early = EarlyEnd(token="<|im_end|>", starts=(), opens="a", ends=(), recipient="")
        called = msgspec.structs.replace(guide, early_end=early)
        opens = engine.tokenizer.encode("a", add_special_tokens=False)
        bias |= dict.fromkeys(opens, 50.0)
        answer = await engine.generate("Hello", guide=called, max_tokens=20, seed=1, logit_bias=bias)
        assert (answer.choices[0].finish_reason, answer.choices[0].text) == ("stop", "a")


async def test_beams_are_refused_by_name(tiny_engine):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(guide=GUIDES[0], use_beam_search=True, temperature=0.0)
    assert (refused.value.param, refused.value.code) == ("structured_outputs.json", "unsupported_parameter")


async def test_settings_hold_for_every_request(tiny_engine):
    spec = GuideSpec(kind="json_schema", source=json.dumps({"type": "object", "properties": {"a": {"const": 1}}}))
    settings = {"guide_any_whitespace": False, "guide_additional_properties": False}
    async with tiny_engine(**settings) as engine:
        for seed in range(10):
            text = (await engine.generate([5], guide=spec, seed=seed, max_tokens=60)).choices[0].text
            assert text in ("{}", '{"a":1}')


FORCED = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True).spec()


async def steps_of(engine: Engine, **wanted: Any) -> tuple[int, tuple[int, ...], str]:
    before = engine.snapshot().scheduler.steps
    answer = await engine.generate([5], guide=FORCED, seed=2, **{"max_tokens": 200} | wanted)
    return engine.snapshot().scheduler.steps - before, answer.choices[0].token_ids, answer.choices[0].finish_reason


async def test_forced_tokens_save_steps(tiny_engine):
    async with tiny_engine() as engine:
        steps, tokens, reason = await steps_of(engine)
        drawn, drawn_tokens, _ = await steps_of(engine, logprobs=0)  # which only a drawn token has
        assert reason == "stop"
        assert steps < len(tokens)
        assert drawn >= len(drawn_tokens)
        await eventually(lambda: engine.snapshot().scheduler.blocks_used == 0)
    async with tiny_engine(guide_fast_forward=False) as engine:
        plain, plain_tokens, _ = await steps_of(engine)
        assert plain >= len(plain_tokens)
        assert plain_tokens == drawn_tokens


async def test_forced_tokens_end_at_the_limit(tiny_engine):
    async with tiny_engine() as engine:
        whole = (await steps_of(engine))[1]
        for most in range(1, 12):
            _, tokens, reason = await steps_of(engine, max_tokens=most)
            assert (tokens, reason) == (whole[:most], "length")
    async with tiny_engine(max_model_len=16) as engine:
        answer = await engine.generate([5] * 8, guide=FORCED, seed=2, max_tokens=8)
        assert len(answer.choices[0].token_ids) == 8


async def test_forced_tokens_wait_for_slow_readers(tiny_engine):
    async with tiny_engine(stream_budget_tokens=4) as engine:
        tokens: list[int] = []
        async with engine.stream([5], guide=FORCED, seed=2, max_tokens=200) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                await anyio.lowlevel.checkpoint()
        assert tuple(tokens) == (await steps_of(engine))[1]


async def test_guides_cross_to_fronts_in_processes_of_their_own(tiny_engine):
    async with tiny_engine() as engine, front_pair(engine) as pair:
        for guide in GUIDES[:4]:
            wanted = {"guide": guide, "max_tokens": 120, "seed": 4, "temperature": 1.0}
            remote, local = await pair.remote.generate([5], **wanted), await engine.generate([5], **wanted)
            assert remote.choices == local.choices
            assert remote.choices[0].finish_reason == "stop"
        with pytest.raises(InvalidRequest, match="uniqueItems") as refused:
            await pair.remote.generate([5], structured_outputs=StructuredOutputsParams(json={"uniqueItems": True}))
        assert (refused.value.param, refused.value.code) == ("structured_outputs.json", "invalid_schema")
