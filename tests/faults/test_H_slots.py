"""Row H1 of the fault table: slots are recycled, and nothing of the last request in one shows in the next.

Random neighbours with every option join, leave by themselves, are aborted, and push each other out of a small KV
cache, while canaries with options of their own run over and over. Each canary's tokens and log-probabilities must be
those of its solo run.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.params.outputs import Completion
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.speculation.scripted_drafts import MODULE as DRAFTS

pytestmark = pytest.mark.anyio

CROWDED = {
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 34,
    "kv_cache_memory_bytes": None,
    "max_num_batched_tokens": 48,
    "max_model_len": 512,
}
"""Slots change hands all the time, prompts come in pieces, and the blocks do not suffice for eight long sequences."""
TOLERANCE = 1e-4
TOKENS = 40
CANARIES = {
    "greedy": {"temperature": 0.0, "logprobs": 5},
    "sampled": {"temperature": 0.9, "seed": 7, "top_p": 0.95, "top_k": 40, "logprobs": 3},
    "penalised": {
        "temperature": 0.7, "seed": 8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
        "logprobs": 2,
    },
    "biased": {
        "temperature": 0.0, "logit_bias": {65: 3.0, 66: -100.0}, "bad_words": ["a", "bc"], "min_tokens": TOKENS,
        "logprobs": 0,
    },
    "several": {"temperature": 1.0, "seed": 9, "n": 3, "min_p": 0.02, "logprobs": 1},
}  # fmt: skip
DRAFTS = {
    "suffix": {"method": "suffix"},
    "trees": {"method": "custom", "custom_class": f"{DRAFTS}:GuessingTrees", "num_speculative_tokens": 7},
}
GUIDES = [
    asked.spec()
    for asked in (
        StructuredOutputsParams(regex="[a-z]{3,60}"),
        StructuredOutputsParams(choice=["one", "another one", "the last"]),
        StructuredOutputsParams(grammar='start: ("ab" | "cd")+ "!"'),
    )
]
NEIGHBOURS = 16
"""At once; twice as many as there are slots."""


def canary(name: str) -> tuple[str, SamplingParams]:
    return f"canary {name}", SamplingParams(max_tokens=TOKENS, ignore_eos=True, **CANARIES[name])


NO_TOKEN = ("no token is left", "min_tokens must be 0 where", "must leave some of allowed_token_ids")


class Crowd:
    """Neighbours whose options, lengths and manner of leaving come from a seed."""

    def __init__(self, engine: Engine, seed: int, *, guided: bool = False) -> None:
        """
        Args:
            guided: every other neighbour writes by a grammar.
        """
        self._engine = engine
        self._guided = guided
        self._random = random.Random(seed)
        self.ends: Counter[str] = Counter()

    async def neighbour(self) -> None:
        choose = self._random
        prompt = [choose.randrange(256) for _ in range(choose.choice((1, 3, 17, 40, 130)))]
        stay = choose.choice((None, None, 0, 1, 5))
        left = False
        async with self._engine.stream(prompt, self.options(), cache_salt=choose.choice((b"", b"other"))) as stream:
            read = 0
            try:
                async for _ in stream:
                    read += 1
                    if stay is not None and read > stay:
                        left = True
                        break
            except TroupeError as error:  # its own options may leave it no token: a row that fails is a neighbour too
                if not any(text in error.message for text in NO_TOKEN):
                    raise
                self.ends["failed"] += 1
                return
        self.ends["left" if left else "finished"] += 1

    def options(self) -> SamplingParams:
        choose = self._random
        most = choose.choice((1, 4, 20, 90))
        options: dict[str, Any] = {
            "max_tokens": most,
            "n": choose.choice((1, 1, 1, 2, 3)),
            "temperature": choose.choice((0.0, 0.3, 1.0, 1.9)),
        }
        for name, values in (
            ("top_p", (0.1, 0.9)),
            ("top_k", (1, 5, 50)),
            ("min_p", (0.05, 0.5)),
            ("seed", (1, 2, 2**40)),
            ("presence_penalty", (-2.0, 2.0)),
            ("frequency_penalty", (-2.0, 2.0)),
            ("repetition_penalty", (0.5, 3.0)),
            ("logit_bias", ({65: 100.0}, dict.fromkeys(range(200), -100.0))),
            ("allowed_token_ids", ([65, 66, 67], [70])),
            ("bad_words", (["a"], ["ab", "b c"])),
            ("stop", ("a", ["b", "\n"])),
            ("stop_token_ids", ([66], list(range(100)))),
            ("min_tokens", (most,)),
            ("ignore_eos", (True,)),
            ("logprobs", (0, 20)),
            ("prompt_logprobs", (0, 5)),
        ):
            if choose.random() < 0.25:
                options[name] = choose.choice(values)
        if self._guided and choose.random() < 0.5:
            options["guide"] = choose.choice(GUIDES)
            self.ends["guided"] += 1
        return SamplingParams(**options)

    async def keep_coming(self) -> None:
        while True:
            await self.neighbour()


async def check(engine: Engine, name: str, solo: Completion) -> None:
    prompt, params = canary(name)
    answer = await engine.generate(prompt, params)
    for choice, alone in zip(answer.choices, solo.choices, strict=True):
        assert choice.token_ids == alone.token_ids, name
        assert numbers(choice.logprobs) == pytest.approx(numbers(alone.logprobs), abs=TOLERANCE), name


def numbers(entries: Sequence[Any] | None) -> list[float]:
    """Every log-probability, the alternatives' too, in an order that depends on the token ids only."""
    assert entries is not None
    flat = []
    for entry in entries:
        flat.append(entry.logprob)
        flat += [other.logprob for other in sorted(entry.top, key=lambda other: other.token_id)]
    return flat


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (1, 300),
        *(pytest.param(seed, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for seed in (2, 3)),
    ],
)
async def test_H1_nothing_of_the_last_request_shows_in_the_next(tiny_engine, seed, steps, caching):
    async with tiny_engine(**CROWDED, enable_prefix_caching=caching) as engine:
        solos = {name: await engine.generate(*canary(name)) for name in CANARIES}
        await crowded(engine, solos, seed, steps)


@pytest.mark.parametrize(
    ("caching", "seed", "steps"),
    [(True, 4, 200), pytest.param(False, 5, 5000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
@pytest.mark.parametrize("drafts", ["trees", pytest.param("suffix", marks=pytest.mark.slow)])
async def test_H1_nothing_of_the_last_request_shows_where_tokens_are_drafted(tiny_engine, drafts, caching, seed, steps):
    async with tiny_engine() as engine:
        solos = {name: await engine.generate(*canary(name)) for name in CANARIES}
    settings = {**CROWDED, "enable_prefix_caching": caching}
    async with tiny_engine(**settings, speculative_config={**DRAFTS[drafts], "adaptive": False}) as engine:
        await crowded(engine, solos, seed, steps)


@pytest.mark.parametrize(
    ("seed", "steps"), [(6, 300), pytest.param(7, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_H1_nothing_of_the_last_request_shows_beside_guided_rows(tiny_engine, seed, steps):
    """A mask is as wide as the vocabulary: what one leaves behind would forbid the next request nearly everything."""
    async with tiny_engine(**CROWDED) as engine:
        solos = {name: await engine.generate(*canary(name)) for name in CANARIES}
        for guide in GUIDES:  # compiled before anybody waits
            await engine.generate([5], guide=guide, max_tokens=4)
        ends = await crowded(engine, solos, seed, steps, guided=True)
    assert ends["guided"] > NEIGHBOURS // 4


async def crowded(
    engine: Engine, solos: dict[str, Completion], seed: int, steps: int, *, guided: bool = False
) -> Counter[str]:
    """So many steps with neighbours that come and go, and canaries that say what they say alone."""
    crowd, rounds = Crowd(engine, seed, guided=guided), 0
    first = engine.snapshot().scheduler
    async with anyio.create_task_group() as group:
        for _ in range(NEIGHBOURS):
            group.start_soon(crowd.keep_coming)
        while rounds < 1 or engine.snapshot().scheduler.steps - first.steps < steps:
            for name, solo in solos.items():
                await check(engine, name, solo)
            rounds += 1
        group.cancel_scope.cancel()
    last = engine.snapshot().scheduler
    print(f"{last.steps - first.steps} steps, {rounds} rounds, {last.preemptions} preemptions, {dict(crowd.ends)}")
    assert last.preemptions > first.preemptions, "the crowd was too small to push anybody out"
    assert min(crowd.ends["left"], crowd.ends["finished"]) > 0
    for name, solo in solos.items():
        await check(engine, name, solo)
    return crowd.ends
