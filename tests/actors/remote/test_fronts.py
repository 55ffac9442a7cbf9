"""An engine used from a front: answers, refusals, disconnects, slow readers, slow fronts, dying fronts."""

from typing import Any

import anyio
import msgspec
import pytest
from anyio.lowlevel import checkpoint

from troupellm.protocol import errors
from troupellm.protocol.config.kv_hints import KVHints
from troupellm.protocol.errors import (
    ContextLengthExceeded,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    RequestFailed,
    TroupeError,
)
from troupellm.protocol.messages.input import Demand, RequestGroup, Submission
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.sampling_checks import RepetitionDetection, ThinkingMarks
from troupellm.protocol.quota import Quota
from troupellm.protocol.wire.api_process import Abort, Apply, Chunks, PauseReader, ResumeReader, Submit, WireError
from troupellm.tests.support.engines.inside import system_of
from troupellm.tests.support.servers.front_pair import FrontPair, front_pair

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


def crossed(pair: FrontPair, kind: type) -> list[Any]:
    return [message for message in pair.from_front.frames if isinstance(message, kind)]


async def test_answers_are_those_of_the_engine_itself(engine_of: Any, expected: Any) -> None:
    async with engine_of() as engine, front_pair(engine) as pair:
        remote = pair.remote
        ids, text = await remote.generate(PROMPT, max_tokens=40, temperature=0.0), await remote.generate("hi there")
        local = await engine.generate(PROMPT, max_tokens=40, temperature=0.0)
        assert list(ids.token_ids) == expected(PROMPT, 40)
        assert (ids.text, ids.choices) == (local.text, local.choices)
        assert (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 40)
        assert 0 <= ids.timing.scheduled <= ids.timing.first_token <= ids.timing.finished
        assert text.prompt == "hi there"
        assert text.prompt_token_ids == tuple(engine.tokenizer.encode("hi there", add_special_tokens=True))
        async with remote.chat([{"role": "user", "content": "hi"}], max_tokens=30, n=2, seed=1) as stream:
            await stream.opened()
            assert remote.tokenizer.decode(stream.prompt_token_ids) == "user:hi;"
            tokens: dict[int, list[int]] = {0: [], 1: []}
            async for delta in stream:
                tokens[delta.index] += delta.token_ids
        wanted = expected(list(stream.prompt_token_ids), 30)
        assert tokens == {0: wanted, 1: wanted}
        assert stream.finish_reasons == {0: "length", 1: "length"}
        assert all(submit.prompt for submit in crossed(pair, Submit))  # only the front tokenized
        assert remote.num_open == 0
        assert not len(pair.session)


async def test_everything_that_a_request_says_crosses(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "request_id": "r-1",
        "params": SamplingParams(
            n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-3, stop=["x", "y"], stop_token_ids=[300],
            include_stop_str_in_output=True, ignore_eos=True, max_tokens=9, min_tokens=2, presence_penalty=0.5,
            frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={5: 1.5}, allowed_token_ids=[5, 6, 300],
            bad_words=["zz"], logprobs=2, prompt_logprobs=1, skip_special_tokens=False, priority=4,
            kept_token_ids=[256],
            logprob_token_ids=[301, 5], spaces_between_special_tokens=False, thinking_token_budget=7,
            thinking=ThinkingMarks(start="<t>", end="</t>", open=True), stream_interval=3,
            repetition_detection=RepetitionDetection(max_pattern_size=9, min_pattern_size=2, min_count=3),
        ),
        "wait": False,
        "tenant": "anna",
        "request_group": RequestGroup(name="call", sequences=2, tokens=9),
        "cache_salt": b"salt",
        "deadline": 50.0,
        "streaming": False,
        "hints": KVHints(session="s-1", retain=60.0),
    }  # fmt: skip
    fields = {field.name: field for field in msgspec.structs.fields(Submission)}
    # See test_pooling, tests/api/test_lora.py and tests/faults/test_R_continued.py.
    elsewhere = {"prompt", "pooling", "many_prompts", "adapter", "generated"}
    assert set(given) | elsewhere == set(fields)
    assert all(given[name] != field.default for name, field in fields.items() if name in given)
    async with engine_of(max_logprobs=5) as engine, front_pair(engine) as pair:
        inside: list[Any] = []
        intake = system_of(engine).intake
        put = intake.put

        async def noted(message: Any) -> None:
            inside.append(message)
            await put(message)

        monkeypatch.setattr(intake, "put", noted)
        for door in (engine, pair.remote):
            async with door.stream(PROMPT, **given) as stream:
                await stream.collect()
        assert inside[1].deadline - inside[1].arrival == pytest.approx(50.0)
        local, remote = (message.submission for message in inside)
        for name in fields:
            if name not in ("prompt", "params"):
                assert getattr(local, name) == getattr(remote, name), name
        assert list(remote.prompt.token_ids) == PROMPT
        for field in msgspec.structs.fields(SamplingParams):
            assert getattr(local.params, field.name) == getattr(remote.params, field.name), field.name


async def test_one_frame_holds_the_pieces_of_all_requests(engine_of: Any, quiet: Any) -> None:
    async with engine_of() as engine, front_pair(engine) as pair:
        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(lambda number=number: pair.remote.generate([number + 5], max_tokens=50))
        async with anyio.create_task_group() as group:
            before = len(pair.to_front.frames), engine.snapshot().scheduler.steps

            async def read(number: int) -> None:
                async with pair.remote.stream([number + 5], max_tokens=50) as stream:
                    assert sum([len(delta.token_ids) async for delta in stream]) == 50

            for number in range(16):
                group.start_soon(read, number)
        frames = [frame for frame in pair.to_front.frames[before[0] :] if isinstance(frame, Chunks)]
        steps = engine.snapshot().scheduler.steps - before[1]
        assert sum(len(chunk.token_ids) for frame in frames for chunk in frame.chunks) == 16 * 50
        assert len(frames) <= steps + 16  # each of the requests may also be opened by itself
        assert max(len({chunk.request for chunk in frame.chunks}) for frame in frames) == 16
        await quiet(engine)


async def test_invalid_requests_are_refused_by_the_front_and_give_their_place_back(engine_of: Any, until: Any) -> None:
    async with engine_of(max_num_seqs=1, max_num_queued_reqs=0) as engine, front_pair(engine) as pair:
        remote = pair.remote
        wrong: list[tuple[Any, type[TroupeError], str]] = [
            ([5, 2000], InvalidRequest, "prompt"),
            ([], InvalidRequest, "prompt"),
            ("\ud800", InvalidRequest, "prompt"),
            ([5] * 5000, ContextLengthExceeded, "prompt"),
            ("x" * 100_000, ContextLengthExceeded, "prompt"),
        ]
        for prompt, kind, param in wrong:
            with pytest.raises(kind) as caught:
                await remote.generate(prompt, wait=False)
            assert caught.value.param == param
            await until(lambda: not len(pair.session))
        with pytest.raises(ContextLengthExceeded) as caught:
            async with remote.chat([{"role": "user", "content": "x" * 5000}], wait=False):
                pass
        assert caught.value.param == "messages"
        await until(lambda: not len(pair.session))
        assert not crossed(pair, Submit)
        assert (await remote.generate(PROMPT, wait=False, max_tokens=1)).finish_reason == "length"


async def test_the_cap_holds_for_all_fronts_together(engine_of: Any, until: Any) -> None:
    async with (
        engine_of(max_num_seqs=2, max_num_queued_reqs=1) as engine,
        front_pair(engine) as one,
        front_pair(engine) as other,
        anyio.create_task_group() as group,
    ):
        for pair in (one, other, one):
            group.start_soon(lambda pair=pair: pair.remote.generate(PROMPT, max_tokens=4000))
        await until(lambda: engine.snapshot().open_requests == 3)
        for pair in (one, other):
            with pytest.raises(EngineOverloaded) as caught:
                await pair.remote.generate("never tokenized", wait=False)
            assert caught.value.retry_after >= 1.0
        assert b'rejected_total{engine="0",model_name' in await one.remote.metrics(compat=False)
        assert engine.snapshot().open_requests == 3
        group.cancel_scope.cancel()


async def test_waiting_in_line_across_the_socket(engine_of: Any, until: Any) -> None:
    async with engine_of(max_num_seqs=1, max_num_queued_reqs=0) as engine, front_pair(engine) as pair:
        answers: list[str] = []

        async def ask(name: str, tokens: int) -> None:
            await pair.remote.generate(PROMPT, max_tokens=tokens)
            answers.append(name)

        async with anyio.create_task_group() as group:
            group.start_soon(ask, "long", 500)
            await until(lambda: engine.snapshot().open_requests)
            group.start_soon(ask, "next", 2)
        assert answers == ["long", "next"]
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "holder", 4000)
            await until(lambda: engine.snapshot().open_requests)
            with anyio.move_on_after(0.05):
                await ask("gives up", 2)
            await until(lambda: len(pair.session) == 1)
            group.cancel_scope.cancel()


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5, 8, 20])
async def test_a_disconnect_at_any_moment_crosses(engine_of: Any, quiet: Any, until: Any, rounds: int) -> None:
    async with engine_of() as engine, front_pair(engine) as pair:
        async with anyio.create_task_group() as group:
            for prompt in (PROMPT, "x" * 3000):
                group.start_soon(lambda prompt=prompt: pair.remote.generate(prompt, max_tokens=900))
            for _ in range(rounds):
                await checkpoint()
            group.cancel_scope.cancel()
        await until(lambda: not len(pair.session))
        await quiet(engine)
        assert pair.remote.num_open == 0


async def test_a_slow_reader_pauses_itself_only(engine_of: Any, until: Any, expected: Any) -> None:
    async with (
        engine_of(stream_budget_tokens=32) as engine,
        front_pair(engine) as pair,
        pair.remote.stream(PROMPT, max_tokens=600, temperature=0.0) as slow,
    ):
        first = await anext(slow)
        await until(lambda: engine.snapshot().scheduler.paused == 1)
        assert crossed(pair, PauseReader)
        plans = engine.config.scheduler.plans_in_flight
        # Both halves of the budget, one token over each, and what the plans under way may add.
        assert engine.snapshot().scheduler.tokens_generated <= 32 + 2 + 2 * plans
        waiting = slow.take_ready()
        fast = await pair.remote.generate([9, 8], max_tokens=300, temperature=0.0)
        assert list(fast.token_ids) == expected([9, 8], 300)
        tokens = list(first.token_ids) + [token for delta in waiting for token in delta.token_ids]
        async for delta in slow:
            tokens += delta.token_ids
        assert tokens == expected(PROMPT, 600)
        assert crossed(pair, ResumeReader)


async def test_pieces_merge_while_the_front_takes_nothing(engine_of: Any, until: Any, expected: Any) -> None:
    async with (
        engine_of(stream_budget_tokens=64) as engine,
        front_pair(engine) as pair,
        pair.remote.stream(PROMPT, max_tokens=500, temperature=0.0) as stream,
    ):
        tokens = list((await anext(stream)).token_ids)
        pair.to_front.set_open(False)
        await until(lambda: engine.snapshot().scheduler.paused == 1)
        crossed_before = len(pair.to_front.frames)
        pair.to_front.set_open(True)
        async for delta in stream:
            tokens += delta.token_ids
        assert tokens == expected(PROMPT, 500)
        assert max(len(frame.chunks) for frame in pair.to_front.frames[crossed_before:] if type(frame) is Chunks) == 1


async def test_a_dying_front_takes_exactly_its_own_requests_along(engine_of: Any, until: Any, expected: Any) -> None:
    async with engine_of() as engine, front_pair(engine) as other:
        answer: list[Any] = []

        async def ask() -> None:
            answer.append(await other.remote.generate(PROMPT, max_tokens=700, temperature=0.0))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            async with front_pair(engine) as dying:
                requests = [dying.remote.stream([number + 5], max_tokens=4000) for number in range(8)]
                for stream in requests:
                    await stream.__aenter__()
                waiting = dying.remote.stream("is being tokenized", max_tokens=10)
                async with anyio.create_task_group() as inner:
                    inner.start_soon(waiting.__aenter__)
                    await until(lambda: len(dying.session) == 9)
                    inner.cancel_scope.cancel()
                dying.from_front.set_open(False)  # nothing that it says arrives any more
                await until(lambda: engine.snapshot().scheduler.running >= 8)
            assert not len(dying.session)
            assert engine.snapshot().open_requests == 1 - len(answer)
            dying.remote.lost()
            for stream in requests:
                await stream.cancel()
        assert list(answer[0].token_ids) == expected(PROMPT, 700)


async def test_an_engine_that_ends_answers_everybody_behind_the_socket(engine_of: Any) -> None:
    async with (
        engine_of() as engine,
        front_pair(engine) as pair,
        pair.remote.stream(PROMPT, max_tokens=4000) as stream,
    ):
        await anext(stream)
        await engine.drain(0.0)
        with pytest.raises(EngineStopped):
            async for _ in stream:
                pass
        pair.remote.handle(pair.status())
        assert pair.remote.state == "draining"
        with pytest.raises(EngineStopped):
            await pair.remote.generate(PROMPT)


async def test_a_lost_engine_process_leaves_nobody_waiting(engine_of: Any, until: Any) -> None:
    async with engine_of() as engine, front_pair(engine) as pair:
        ends: list[BaseException] = []

        async def expect_end(call: Any) -> None:
            try:
                await call
            except EngineStopped as error:
                ends.append(error)

        async with anyio.create_task_group() as group:
            pair.from_front.set_open(False)
            group.start_soon(expect_end, pair.remote.generate(PROMPT))
            group.start_soon(expect_end, pair.remote.metrics(compat=True))
            await until(lambda: pair.remote.num_open == 2)
            pair.remote.lost()
        assert len(ends) == 2
        assert pair.remote.state == "failed"
        with pytest.raises(EngineStopped) as caught:
            await pair.remote.generate(PROMPT)
        assert caught.value.code == "engine_failed"
        pair.from_front.set_open(True)


async def test_ages_count_on_between_two_reports(engine_of: Any) -> None:
    async with engine_of() as engine, front_pair(engine) as pair:
        remote = pair.remote
        for told in (None, 5.0):
            snapshot = msgspec.structs.replace(engine.snapshot(), last_step_age_seconds=told, step_seconds=told)
            remote.handle(msgspec.structs.replace(pair.status(), snapshot=snapshot))
            pair.clock.ahead += 2.0
            seen = remote.snapshot()
            for age in (seen.last_step_age_seconds, seen.step_seconds):
                assert age is None if told is None else age >= told + 2.0


def test_every_error_crosses_with_what_it_says() -> None:
    given: list[TroupeError] = [
        kind("text", param="field", code="a_code")
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, TroupeError)
        and kind not in (ContextLengthExceeded, EngineOverloaded, errors.RateLimited, errors.AdapterError)
        and not issubclass(kind, errors.ModelLoadError)
    ]
    given += [ContextLengthExceeded("long", limit=7, got=9, param="prompt"), EngineOverloaded("full", retry_after=3.5)]
    given.append(errors.AdapterError("a tensor is missing", hint="save it again"))
    given.append(errors.RateLimited("limit", retry_after=2.0, quota=Quota(limit_tokens=9, reset_tokens=1.5)))
    assert len(given) > 8
    for error in given:
        error.__cause__ = ValueError("stays here")
        back = WireError.of(error).error()
        assert type(back) is type(error)
        assert str(back) == str(error)
        plain = {name: value for name, value in vars(error).items() if name != "__notes__"}
        assert vars(back) == plain
        assert back.retryable == error.retryable
    assert isinstance(WireError("Exception", {}).error(), RequestFailed)
    assert isinstance(WireError("nobody", {}).error(), RequestFailed)


def test_messages_that_break_the_rules_are_refused(engine_of: Any) -> None:
    async def main() -> None:
        async with engine_of() as engine:
            session = engine.api_process_session(lambda message: None, lambda: checkpoint())
            apply = Apply(request=1, arrival=0.0, demand=Demand(sequences=1, tokens=1), wait=False, deadline=None)
            session.handle(apply)
            with pytest.raises(ValueError, match="twice"):
                session.handle(apply)
            for message in (Abort(9), PauseReader(9), ResumeReader(9)):  # ended already: ignored
                session.handle(message)

    anyio.run(main)
