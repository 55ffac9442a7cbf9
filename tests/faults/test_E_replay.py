"""Row E1 with the worker on a thread: for all sampling parameters, a stream goes on with the tokens of its solo run."""

import anyio
import pytest

from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.worker import StepPlan
from troupellm.protocol.params.sampling_checks import RepetitionDetection, ThinkingMarks
from troupellm.tests.support.servers.serving import eventually
from troupellm.tests.support.workers.meddler import WorkerHosts

pytestmark = pytest.mark.anyio

ASKS = {
    "greedy": {"temperature": 0.0},
    "greedy with log-probabilities": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "seeded": {"seed": 7, "temperature": 1.3},
    "seeded forks": {"seed": 8, "temperature": 1.1, "n": 3, "logprobs": 2},
    "penalties": {
        "seed": 9, "temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.6,
    },
    "a thinking budget": {
        "seed": 10, "n": 2, "thinking_token_budget": 4, "thinking": ThinkingMarks(start="", end="</t>", open=True),
    },
    "repetition": {
        "seed": 11, "allowed_token_ids": [65, 66],
        "repetition_detection": RepetitionDetection(max_pattern_size=3, min_count=4),
    },
    "listed log-probabilities": {"temperature": 0.0, "logprob_token_ids": [9, 200]},
    "bias and a floor": {"temperature": 0.0, "logit_bias": {20: 4.0, 21: 3.5}, "min_tokens": 10},
}  # fmt: skip


async def streamed(engine, number: int, fields):
    """Per choice: tokens, text, and log-probabilities as (token, value); then those of the prompt."""
    parts: dict[int, list] = {}
    options = {"max_tokens": 24, "ignore_eos": True, **fields}
    async with engine.stream([30 + number, 5, 9, 14, 3], **options) as stream:
        async for delta in stream:
            tokens, text, logprobs = parts.setdefault(delta.index, [[], [], []])
            tokens.extend(delta.token_ids)
            text.append(delta.text)
            logprobs.extend((entry.token_id, entry.logprob) for entry in delta.logprobs or ())
        prompt = [None if entry is None else entry.logprob for entry in stream.prompt_logprobs or ()]
    return {index: (tokens, "".join(text), logprobs) for index, (tokens, text, logprobs) in parts.items()}, prompt


def check_same(found, solo) -> None:
    (choices, prompt), (right, right_prompt) = found, solo
    assert choices.keys() == right.keys()
    for index, (tokens, text, logprobs) in choices.items():
        assert tokens == right[index][0]
        assert text == right[index][1]
        assert [token for token, _ in logprobs] == [token for token, _ in right[index][2]]
        assert [value for _, value in logprobs] == pytest.approx([value for _, value in right[index][2]], abs=1e-4)
    assert prompt[1:] == pytest.approx(right_prompt[1:], abs=1e-4)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("fault", ["any", "memory", "killed"])
async def test_E1_streams_go_on_with_the_tokens_of_their_solo_runs(tiny_engine, caching, fault):
    async with tiny_engine(enable_prefix_caching=caching) as engine:
        solo = {name: await streamed(engine, number, ASKS[name]) for number, name in enumerate(ASKS)}
    hosts = WorkerHosts()
    settings = {"enable_prefix_caching": caching, "max_num_batched_tokens": 32}
    async with tiny_engine(worker=hosts, **settings) as engine:
        steps = [0]

        def die_now_and_then(plan: StepPlan) -> None:
            steps[0] += 1
            if fault == "killed":
                if steps[0] % 5 == 0:  # however often: no request is to blame
                    raise WorkerGone("somebody killed it", fault=False)
            elif steps[0] in (4, 30):  # far enough apart for the suspects to be cleared
                raise MemoryError if fault == "memory" else RuntimeError("the worker died")

        hosts.worker.on_launch = die_now_and_then
        found = {}

        async def ask(number: int, name: str) -> None:
            found[name] = await streamed(engine, number, ASKS[name])

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number, name in enumerate(ASKS):
                    group.start_soon(ask, number, name)
        snapshot = engine.snapshot().scheduler
        assert snapshot.worker_losses >= (4 if fault == "killed" else 2)
        assert snapshot.replays > snapshot.worker_losses
        assert snapshot.blamed == 0
        for name in ASKS:
            check_same(found[name], solo[name])
        await eventually(lambda: not engine.snapshot().scheduler.blocks_used)


async def test_E2_a_hung_thread_fails_the_engine_with_its_reason(tiny_engine):
    import threading

    hosts, gate = WorkerHosts(), threading.Event()
    async with tiny_engine(worker=hosts, step_timeout=0.5) as engine:
        hosts.worker.on_launch = lambda plan: gate.wait(30) and None
        with pytest.raises(TroupeError, match="step_timeout") as caught:
            await engine.generate([5, 6], max_tokens=4)
        assert caught.value.code == "engine_failed"
        assert "actor: worker" in engine.failure.__notes__
        gate.set()
