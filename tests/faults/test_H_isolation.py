"""Rows H2, H3 and H5 of the fault table: what requests may share with each other, and what of memory shows."""

import random
from array import array

import anyio
import pytest
import torch
from hypothesis import given, settings, strategies as st

from troupellm.actors.kv_cache.block_hash import PrefixHasher, namespace, split_keys
from troupellm.tests.support.scheduler.oracle import Harness, make_core, submission
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.serving import server_config
from troupellm.tests.support.workers.recording import RecordingWorker, recording

STEP_TOKENS = 128
FIXED_BUDGET = {"max_num_prefill_tokens": STEP_TOKENS, "itl_target_ms": 0, "scheduling_policy": "fcfs"}
"""How a prompt is cut depends neither on how long steps take nor on who waits, so that steps can be counted."""
PROMPT_TOKENS = 600
ANSWER_TOKENS = 3
COLD = (5 + ANSWER_TOKENS - 1, PROMPT_TOKENS + ANSWER_TOKENS - 1)
"""Steps and positions of such a prompt when nothing of it is found; the canaries take a few tokens of each step."""
FOUND = (ANSWER_TOKENS, ANSWER_TOKENS)
"""The same when all of it is found: its last token, and those of the answer but the last."""


def tokens(seed: int, count: int = PROMPT_TOKENS) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(200) for _ in range(count)]


class Sender:
    """Sends prompts under keys and says what they cost."""

    def __init__(self, attacked, worker: RecordingWorker) -> None:
        self._client = attacked.client
        self._worker = worker
        self.answers: set[tuple[int, ...]] = set()

    async def send(self, key: str, prompt: list[int], **fields: str) -> tuple[int, tuple[int, int]]:
        """Cached tokens as the client hears of them; steps and positions as the worker counts them."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": f"Bearer {key}"}
        response = await self._client.post(
            "/v1/completions", json=body | {"return_token_ids": True} | fields, headers=headers
        )
        assert response.status_code == 200, response.text
        answer = response.json()
        self.answers.add(tuple(answer["choices"][0]["token_ids"]))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], self._worker.computed(answer["id"])


@pytest.mark.anyio
async def test_H2_a_foreign_prefix_costs_what_a_cold_one_costs(tiny_engine):
    workers: list[RecordingWorker] = []
    config = server_config(api_key=("canaries", "one", "two"))
    engine = tiny_engine(worker=recording(workers), max_num_batched_tokens=STEP_TOKENS, **FIXED_BUDGET)
    prompt = tokens(1)
    async with engine, under_attack(engine, config) as attacked:
        sender = Sender(attacked, workers[0])
        assert await sender.send("one", prompt) == (0, COLD)
        assert await sender.send("one", prompt) == (PROMPT_TOKENS - 1, FOUND)
        assert await sender.send("two", prompt) == (0, COLD)
        assert await sender.send("two", prompt) == (PROMPT_TOKENS - 1, FOUND)
        assert await sender.send("one", prompt, cache_salt="team") == (0, COLD)
        assert await sender.send("two", prompt, cache_salt="team") == (PROMPT_TOKENS - 1, FOUND)
        assert await sender.send("two", prompt, cache_salt="other") == (0, COLD)
        # A salt that is spelled like a key is not that key.
        assert await sender.send("two", prompt, cache_salt="one") == (0, COLD)
        assert len(sender.answers) == 1


@pytest.mark.anyio
async def test_H2_a_foreign_prefix_cannot_be_found_token_by_token(tiny_engine):
    """An attacker who knows all but the last tokens of a prompt learns nothing by trying them, block by block."""
    workers: list[RecordingWorker] = []
    config = server_config(api_key=("canaries", "victim", "attacker"))
    engine = tiny_engine(worker=recording(workers))
    secret = tokens(2, 40)
    async with engine, under_attack(engine, config) as attacked:
        sender = Sender(attacked, workers[0])
        await sender.send("victim", secret)
        for known in (1, 15, 16, 17, 32, 39):
            guess = [*secret[:known], 3]
            cached, (steps, positions) = await sender.send("attacker", guess, cache_salt=f"{known}")
            assert (cached, steps, positions) == (0, ANSWER_TOKENS, known + ANSWER_TOKENS)
        # Without a salt the attacker meets only what it sent itself.
        assert (await sender.send("attacker", secret))[0] == 0


owners = st.one_of(
    st.builds(lambda tenant: {"tenant": tenant}, st.text(max_size=4)),
    st.builds(lambda salt: {"cache_salt": salt}, st.binary(min_size=1, max_size=4)),
    st.builds(lambda tenant, salt: {"tenant": tenant, "cache_salt": salt}, st.text(max_size=3), st.binary(max_size=3)),
)
spaces = st.builds(
    lambda owner, rest: owner | rest,
    owners,
    st.fixed_dictionaries(
        {},
        optional={
            "adapter": st.text(max_size=3),
            "media": st.lists(st.binary(max_size=3), max_size=2).map(tuple),
            "positions": st.sampled_from(["", "mrope", "alibi"]),
        },
    ),
)


def meaning(space: dict[str, object]) -> tuple[object, ...]:
    """The meaning of a namespace: equal meanings share, all others do not."""
    salt = space.get("cache_salt")
    owner = ("salt", salt) if salt else ("tenant", space.get("tenant", ""))
    return (owner, space.get("adapter", ""), space.get("positions", ""), space.get("media", ()))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(one=spaces, two=spaces)
def test_H3_namespaces_are_spelled_alike_only_if_they_mean_the_same(one, two):
    assert (namespace(**one) == namespace(**two)) == (meaning(one) == meaning(two))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    prompts=st.tuples(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9)),
    spelled=st.tuples(spaces, spaces),
    secrets=st.tuples(st.sampled_from([b"a", b"b"]), st.sampled_from([b"a", b"b"])),
)
def test_H3_keys_are_equal_only_for_equal_content_of_one_namespace(prompts, spelled, secrets):
    size = 2
    chains = [
        split_keys(PrefixHasher(secret, size).prompt_keys(namespace(**space), array("i", prompt).tobytes()))
        for prompt, space, secret in zip(prompts, spelled, secrets, strict=True)
    ]
    same_space = meaning(spelled[0]) == meaning(spelled[1]) and secrets[0] == secrets[1]
    for first, one in enumerate(chains[0]):
        assert len(one) == 32
        for second, two in enumerate(chains[1]):
            same = first == second and prompts[0][: size * first] == prompts[1][: size * second]
            assert (one == two) == (same and same_space)


def test_H3_a_salt_that_imitates_a_block_names_none():
    """Roots and blocks are keyed apart, so no salt can be chosen whose root is another chain's key."""
    hasher = PrefixHasher(b"s", 2)
    plain = split_keys(hasher.prompt_keys(namespace(), array("i", [1, 2, 3, 4]).tobytes()))
    imitations = [
        namespace(cache_salt=plain[0] + array("i", [1, 2]).tobytes()),
        namespace(cache_salt=plain[0]),
        plain[0] + array("i", [1, 2]).tobytes(),
        plain[1],
    ]
    for imitation in imitations:
        assert not set(split_keys(hasher.prompt_keys(imitation, array("i", [1, 2, 3, 4]).tobytes()))) & set(plain)


def test_H3_the_secret_is_drawn_anew_for_every_engine(tiny_engine):
    """Without the secret a key cannot be computed; a fixed seed does not fix it."""
    from troupellm.actors.runtime.ports import SeededRandomness, SystemRandomness

    drawn = {source.token(32) for source in (SeededRandomness(1), SeededRandomness(1), SystemRandomness())}
    assert len(drawn) == 3
    assert {len(token) for token in drawn} == {64}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=2, max_size=6),
    salts=st.lists(st.sampled_from([b"", b"x", b"y", b"xy"]), min_size=6, max_size=6),
)
def test_H3_the_scheduler_reuses_nothing_across_namespaces(prompts, salts):
    """Found tokens of each request: never more than what its own namespace has computed before."""
    harness = Harness(make_core())
    known: dict[bytes, list[list[int]]] = {}
    for number, (prompt, salt) in enumerate(zip(prompts, salts, strict=False), 1):
        harness.submit(submission(number, prompt, cache_salt=salt, max_tokens=3))
        harness.run()
        mine = known.setdefault(salt, [])
        longest = max((common(prompt[:-1], other) for other in mine), default=0)
        assert harness.reader.closed[number].usage.cached_tokens == longest
        mine.append((prompt + harness.reader.streams[100 * number])[:-1])


def common(one: list[int], two: list[int]) -> int:
    return next(
        (index for index, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two))
    )


@pytest.mark.anyio
async def test_H3_a_salt_of_another_type_is_refused(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=20) as attacked:
        for salt in (5, True, ["one"], {"a": 1}, "", "x" * 129, 1.5):
            body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "cache_salt": salt}
            response = await attacked.client.post("/v1/completions", json=body)
            assert response.status_code == 400, (salt, response.text)
            assert "cache_salt" in response.text


@pytest.fixture
def poisoned_buffers():
    """Uninitialised memory of torch is NaN, or the largest number of its type."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
    torch.use_deterministic_algorithms(before[0])


CROWDED = {"num_gpu_blocks_override": 40, "max_model_len": 320, "max_num_batched_tokens": 64}
OPTIONS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "top_k": 20, "min_p": 0.01, "n": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
)


async def crowd(engine):
    """Answers of requests that crowd the pool: shared beginnings, preemptions, every kind of sampling, aborts."""
    prompts = [tokens(5, 50 + 3 * (number // 3))[: 40 + number] + tokens(number, 5) for number in range(15)]
    answers: dict[int, tuple[object, ...]] = {}

    async def ask(number: int) -> None:
        options = OPTIONS[number % len(OPTIONS)] | {"max_tokens": 40, "ignore_eos": True, "logprobs": 2}
        completion = await engine.generate(prompts[number], **options)
        answers[number] = (
            [choice.token_ids for choice in completion.choices],
            [entry.logprob for choice in completion.choices for entry in choice.logprobs],
        )

    async def leave(number: int) -> None:
        async with engine.stream(prompts[number], max_tokens=40, ignore_eos=True) as stream:
            await anext(stream)

    async with anyio.create_task_group() as group:
        for number in range(len(prompts)):
            group.start_soon(ask, number)
            group.start_soon(leave, number)
    return [answers[number] for number in range(len(prompts))]


@pytest.mark.anyio
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("pattern", "caching"),
    [
        ("nan", True),
        ("0x7f", False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("nan", False), ("0x7f", True))),
    ],
)
async def test_H5_uninitialised_memory_changes_nothing(tiny_engine, poisoned_buffers, pattern, caching):
    chosen = CROWDED | {"enable_prefix_caching": caching}
    torch.use_deterministic_algorithms(False)
    async with tiny_engine(**chosen) as engine:
        expected = await crowd(engine)
    torch.use_deterministic_algorithms(True)
    async with (
        tiny_engine(**chosen, poison_memory=pattern) as engine,
        under_attack(engine, canary_tokens=60),
    ):
        found = await crowd(engine)
        assert engine.snapshot().scheduler.preemptions > 0
        assert bool(engine.snapshot().scheduler.prefix_hits) == caching
    for (answer, logprobs), (right, right_logprobs) in zip(found, expected, strict=True):
        assert answer == right
        assert logprobs == pytest.approx(right_logprobs, abs=1e-4)
