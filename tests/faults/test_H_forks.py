"""Row H4 of the fault table: forks, list prompts and beams that are aborted, one or all.

`tests/actors/scheduler/test_machine.py` walks the same at random, with the references of every block checked against
the tables that hold it after each operation; here it is the whole engine, and its canaries are unharmed.
"""

import anyio
import anyio.lowlevel
import pytest

from troupellm.protocol.params.sampling import SamplingParams
from troupellm.tests.support.servers.canary import under_attack

pytestmark = pytest.mark.anyio

FORKS = SamplingParams(n=6, temperature=1.0, seed=4, max_tokens=400, ignore_eos=True)
BEST = SamplingParams(n=1, best_of=4, temperature=1.0, seed=4, max_tokens=400, ignore_eos=True)
BEAMS = SamplingParams(n=4, use_beam_search=True, temperature=0.0, max_tokens=300, ignore_eos=True)


@pytest.mark.parametrize("caching", [True, False])
async def test_H4_references_are_exact_after_aborts(tiny_engine, caching):
    settings = {"num_gpu_blocks_override": 400, "enable_prefix_caching": caching, "max_model_len": 1024}
    async with tiny_engine(**settings) as engine, under_attack(engine, canary_tokens=60) as attacked:
        prompt = [5 + index % 200 for index in range(70)]
        for params in (FORKS, BEST, BEAMS):
            streams = [engine.stream(prompt, params, streaming=False) for _ in range(3)]
            for stream in streams:
                await stream.opened()
            steps = engine.snapshot().scheduler.steps
            while engine.snapshot().scheduler.steps < steps + 8:
                await anyio.lowlevel.checkpoint()
            await streams[1].cancel()  # one
            assert not streams[0].finished
            for stream in streams:  # all
                await stream.cancel()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                body = {"model": "tiny", "prompt": [prompt, prompt[:40], prompt[:9]], "n": 3, "max_tokens": 400}
                group.start_soon(post, attacked.client, body | {"ignore_eos": True})
                steps = engine.snapshot().scheduler.steps
                while engine.snapshot().scheduler.steps < steps + 20:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        again = await engine.generate(prompt, FORKS, max_tokens=5)
        assert len(again.choices) == 6
    # `under_attack` has seen every block come back; what is left is what the prefix cache keeps.


async def post(client, body):
    await client.post("/v1/completions", json=body)
