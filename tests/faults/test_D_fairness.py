"""Rows D6 and D7 of the fault table: one tenant floods while another asks, and long prompts beside running streams.

Waiting time is counted in steps, so a busy machine changes nothing.
"""

from itertools import count

import anyio
import anyio.lowlevel
import pytest

from troupellm.server.access.keys import read_keys
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, stream_of, submission
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.serving import eventually, server_config
from troupellm.tests.support.workers.recording import RecordingWorker

CHUNK = 64
NEVER = frozenset[int]()


def steps_to_first_token(harness: Harness, request: int, prompt: list[int]) -> int:
    """Plans from the arrival to the first token, those that were in flight already among them."""
    harness.submit(submission(request, prompt, tenant="polite", max_tokens=6))
    for steps in count(1):
        assert harness.step(), "the scheduler stands still"
        if harness.outputs[-1].rows and 100 * request in harness.outputs[-1].rows:
            return steps
    raise AssertionError("unreachable")


@pytest.mark.parametrize("plans", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("prompt_tokens", [6, 40])
@pytest.mark.parametrize("flood_prompt", [pytest.param(6, marks=pytest.mark.slow), 300])
def test_D6_a_polite_tenant_waits_no_longer_than_a_step_more_than_twice_its_solo_time(
    plans: int, prompt_tokens: int, flood_prompt: int
) -> None:
    """The other one has filled every row, has hundreds waiting, and its prompts are under way: with them it shares the
    prompt tokens of a step, and it waits for the plan in flight, be there another one behind that or not."""

    def make() -> Harness:
        made = ready(num_blocks=2000, max_model_len=600)
        config = {"max_num_seqs": 8, "max_num_prefill_tokens": 16, "max_plans_in_flight": plans}
        return Harness(make_core(made, async_scheduling=plans == 2, **config), made)

    prompt = [3] * prompt_tokens
    solo = steps_to_first_token(make(), 1, prompt)
    harness = make()
    for request in range(100, 400):
        harness.submit(submission(request, [request % 50] * flood_prompt, tenant="flood", max_tokens=200))
    for _ in range(60):
        harness.step()
    waits = []
    for turn in range(5):
        waits.append(steps_to_first_token(harness, 1 + turn, [3 + turn] * prompt_tokens))
        for _ in range(10):
            harness.step()
    assert max(waits) <= 2 * solo + 1, (solo, waits)
    for turn in range(5):
        assert harness.reader.streams[100 * (1 + turn)] == stream_of([3 + turn] * prompt_tokens, 0, 6, NEVER)


@pytest.mark.anyio
async def test_D6_a_flood_under_one_key_refuses_nobody_else(tiny_engine):
    """Five times what fits, from one key, without a pause: canaries and the polite key notice no refusal."""
    config = server_config(api_key=("canaries", "flood", "polite"))
    engine = tiny_engine(max_num_seqs=4, max_num_queued_reqs=8, tenants=read_keys(config).tenants)
    ask = {"model": "tiny", "temperature": 0, "ignore_eos": True}
    async with engine, under_attack(engine, config, canary_tokens=30) as attacked:
        over = False
        statuses: set[int] = set()

        async def flood(client) -> None:
            while not over:
                response = await client.post("/v1/completions", json=ask | {"prompt": "me " * 20, "max_tokens": 60})
                statuses.add(response.status_code)
                await anyio.lowlevel.checkpoint()

        async with (
            attacked.served.client(key="flood") as loud,
            attacked.served.client(key="polite") as client,
            anyio.create_task_group() as group,
        ):
            solo = await client.post("/v1/completions", json=ask | {"prompt": "please", "max_tokens": 8})
            for _ in range(30):
                group.start_soon(flood, loud)
            await eventually(lambda: 429 in statuses, 20)
            for _ in range(10):
                answer = await client.post("/v1/completions", json=ask | {"prompt": "please", "max_tokens": 8})
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"] == solo.json()["choices"]
            over = True
        assert statuses == {200, 429}


class Watching(RecordingWorker):
    """Also keeps, per plan, how many tokens of prompts it computes and which rows it names."""

    def load(self, config, progress):
        self.prompt_tokens: list[int] = []
        self.named: list[set[str]] = []
        return super().load(config, progress)

    def launch(self, plan):
        ticket = super().launch(plan)
        self.prompt_tokens.append(sum(counted for counted in plan.counts if counted > 1))
        self.named.append({self._names[row] for row in plan.rows})
        return ticket


@pytest.mark.anyio
async def test_D7_long_prompts_do_not_hold_up_running_streams(tiny_engine):
    """Every step gives every running stream its token, and computes no more of prompts than a chunk."""
    workers: list[Watching] = []

    def make(folder):
        workers.append(Watching(folder))
        return workers[-1]

    engine = tiny_engine(worker=make, max_num_prefill_tokens=CHUNK, itl_target_ms=0)
    async with engine, under_attack(engine, canary_tokens=30):
        async with engine.stream("stream", max_tokens=400, ignore_eos=True, request_id="stream") as stream:
            await anext(stream)
            worker = workers[0]
            began = len(worker.named)
            async with anyio.create_task_group() as group:
                for number in range(4):
                    prompt = [number + 1] * 2000
                    group.start_soon(lambda prompt=prompt: engine.generate(prompt, max_tokens=2, ignore_eos=True))
                async for _ in stream:
                    pass
            ended = max(index for index, named in enumerate(worker.named) if "stream" in named)
        busy = range(began, ended + 1)
        assert sum(worker.prompt_tokens[index] for index in busy) > 4000
        assert max(worker.prompt_tokens[index] for index in busy) <= CHUNK
        assert all("stream" in worker.named[index] for index in busy)
