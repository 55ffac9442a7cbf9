"""How long an idle server takes to its first token."""

import asyncio
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from troupellm.load_tests.client.client import Target
from troupellm.load_tests.client.driver import drive
from troupellm.load_tests.client.records import SampleRequest
from troupellm.load_tests.gpu.engine import LARGE, Models
from troupellm.load_tests.gpu.engines import random_tokens
from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.peers.environments import link_package
from troupellm.load_tests.peers.process import ContestantError
from troupellm.load_tests.peers.server_process import ServerProcess
from troupellm.load_tests.peers.servers import ServerPlan, plan_server
from troupellm.load_tests.roofline import BF16, SIZES, prefill_seconds

PROMPTS = {"128": 128, "1k": 1024, "8k": 8192}
ROUNDS = 7
"""Of each length, beside one that warms up."""
TOLD = {"model", "enable_prefix_caching", "max_num_seqs", "max_model_len", "num_threads"}
"""Settings that such a server is told anyway."""
START_SECONDS, ANSWER_SECONDS = 240.0, 30.0


def idle_server(models: Models) -> Found:
    """G26: the least time of a prompt over the time from sending a request to its first token, one after another."""
    found, details, size = dict[str, float](), dict[str, Any](), SIZES[LARGE]
    server = ServerProcess(_plan(models), models.folder / "server.log")
    try:
        server.wait_ready(START_SECONDS)
        for name, tokens in PROMPTS.items():
            prompts = [random_tokens(tokens, size.vocab, number) for number in range(ROUNDS + 1)]
            seconds = median(asyncio.run(_one_by_one(server.url, prompts))[1:])
            least = prefill_seconds(size, BF16, models.roof(), tokens=tokens)
            found[name] = least / seconds
            details[name] = {"ms": seconds * 1e3, "roofline ms": least * 1e3}
    finally:
        server.close()
    return found, details


def _plan(models: Models) -> ServerPlan:
    """With the settings of an engine for one sequence."""
    longest = max(PROMPTS.values()) + 16
    settings = models.serving(LARGE, 1, longest)
    plan = plan_server(
        "troupellm",
        model=settings["model"],
        peers=models.folder,
        link=link_package(models.folder / "import"),
        threads=4,
        sequences=1,
        length=longest,
    )
    for name in settings.keys() - TOLD:
        value = settings[name]
        values = value if isinstance(value, tuple) else (value,)
        plan.command.extend((f"--{name.replace('_', '-')}", *map(str, values)))
    return plan


async def _one_by_one(url: str, prompts: list[list[int]]) -> list[float]:
    """Seconds to the first token of each, no other one beside it."""
    body = {"temperature": 0.0, "ignore_eos": True}
    target = Target.make(
        urlsplit(url), "/v1/completions", api_key=None, chat=False, model="model", body=body, timeout=ANSWER_SECONDS
    )
    found = []
    for prompt in prompts:
        result = await drive(target, [SampleRequest(prompt=prompt, output_len=1)], [0.0], ignore_eos=True)
        (record,) = result.records
        if not record.ok:
            raise ContestantError(f"a request failed: {record.error}")
        found.append(record.chunk_times[0] - record.sent)
    return found
