"""`prompt_logprobs` of prompts of 1 to 300 tokens, alone and in batches, embedded and served: 1,000 requests in all.

Every prompt is the beginning of one text, so that the values of a short prompt are the first values of the longest one.
The embedded engine runs with `TROUPE_GUARD=1`: the compiled code compares guard bytes after each call.
"""

import json
import os
import subprocess
import sys

import anyio
import httpx
import numpy as np
import pytest

from troupellm.load_tests.traffic.own_server import own_server

FORMATS = {"float32": None, "int8": "int8", "int4": "int4"}
TEXT = np.random.default_rng(5).integers(300, 2000, 300).tolist()
ALONE = [*range(1, 70), *range(70, 301, 8), 299, 300]
TOGETHER = [*range(1, 301, 4), *range(1, 37)]
SERVED = [*range(1, 300, 5), 63, 64, 65, 300, *range(2, 300, 5)]
NEAR = {"float32": 2e-3, "int8": 0.4, "int4": 1e-2}
"""How far values may be from those of the longest prompt. Under int4 inputs have fifteen bits: one value was seen 0.002
away. With int8 inputs the last bit of a row's sum can move some of
its inputs to the next of 255 values: one value of 335 requests was seen 0.2001 away."""
EMBEDDED = """
import json, sys
from troupellm import LLM, SamplingParams
from troupellm.kernels import cpp as native
from troupellm.kernels.cpp import guard

assert guard.ON and native.load() is not None
text, alone, together, quantization = json.loads(sys.argv[1])
asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
with LLM(quantization=quantization, device="cpu", num_threads=2, kv_cache_memory_bytes=64 * 2**20) as llm:
    def values(lengths):
        prompts = [{"prompt_token_ids": text[:length]} for length in lengths]
        return [
            [None if entry is None else entry[token].logprob for entry, token in zip(
                output.prompt_logprobs, output.prompt_token_ids, strict=True)]
            for output in llm.generate(prompts, asked, use_tqdm=False)
        ]
    found = [values([length])[0] for length in alone] + values(together)
print(json.dumps(found))
"""


def check(found: list[list[float | None]], lengths: list[int], longest: list[float | None], near: float) -> None:
    assert len(found) == len(lengths)
    for values, length in zip(found, lengths, strict=True):
        assert len(values) == length
        assert values[0] is None
        np.testing.assert_allclose(values[1:], longest[1:length], atol=near, rtol=0.0)


def embedded(kind: str) -> list[list[float | None]]:
    """Of `ALONE` and `TOGETHER`, in a fresh process."""
    given = json.dumps([TEXT, ALONE, TOGETHER, FORMATS[kind]])
    environment = {**os.environ, "TROUPE_GUARD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED, given], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[list[float | None]] = json.loads(done.stdout.splitlines()[-1])
    return found


async def served(kind: str) -> list[list[float | None]]:
    """Of `SERVED`, the first half one by one and the others all at once."""
    flags = ["--quantization", FORMATS[kind] or ""] if FORMATS[kind] else []
    async with own_server(None, flags) as server, httpx.AsyncClient(base_url=server.url, timeout=300.0) as client:

        async def ask(number: int) -> None:
            prompt = TEXT[: SERVED[number]]
            body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            found[number] = [
                None if entry is None else entry[str(token)]["logprob"]
                for entry, token in zip(choice["prompt_logprobs"], prompt, strict=True)
            ]

        found: list[list[float | None]] = [[] for _ in SERVED]
        half = len(SERVED) // 2
        for number in range(half):
            await ask(number)
        async with anyio.create_task_group() as group:
            for number in range(half, len(SERVED)):
                group.start_soon(ask, number)
        return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", FORMATS)
async def test_a_short_prompt_has_the_values_of_the_longest_one_alone_together_and_served(kind: str) -> None:
    assert len(FORMATS) * (len(ALONE) + len(TOGETHER) + len(SERVED)) >= 1000
    found = embedded(kind)
    longest = found[len(ALONE) - 1]
    check(found, ALONE + TOGETHER, longest, NEAR[kind])
    check(await served(kind), SERVED, longest, NEAR[kind])


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": False})


pytestmark = pytest.mark.anyio
