"""Rows of the fault table that the simulator proves. Each runs scenarios that are made for its row."""

from collections.abc import Iterable
from itertools import pairwise, product
from random import Random

import msgspec
import pytest
from simulator.faults import ACTORS, CRASHES, LOSSES, MAILBOXES, SILENT, Fault
from simulator.history import Verdict
from simulator.model import ToyGuide
from simulator.runner import run_scenario
from simulator.workload import STALL_TIMEOUT, Ask, Scenario, draw_scenario

from troupellm.protocol.messages.input import TokensPrompt
from troupellm.protocol.params.guide import GuideSpec
from troupellm.protocol.params.sampling import SamplingParams

MESSAGES = 12
"""At how many messages each actor crashes."""


def assert_right(verdicts: Iterable[Verdict]) -> list[Verdict]:
    found = list(verdicts)
    failures = [f"seed {verdict.seed}: {verdict.failures[0]}" for verdict in found if verdict.failures]
    assert not failures, "\n".join(failures[:20])
    return found


def changed(scenario: Scenario, *, faults: tuple[Fault, ...] = (), **scheduler: object) -> Scenario:
    """With these faults and no others, and these scheduler settings."""
    config = scenario.config
    settings = msgspec.structs.replace(config.scheduler, **scheduler)
    return msgspec.structs.replace(scenario, faults=faults, config=msgspec.structs.replace(config, scheduler=settings))


def crowd(seed: int, *, size: int, num_blocks: int, prompt: int, answer: int) -> Scenario:
    """Many readers at once, all patient, in a cache that holds few of them."""
    random, scenario = Random(seed), draw_scenario(seed)
    asks = tuple(
        Ask(
            number=number,
            start=0.0,
            prompt=TokensPrompt(tuple(random.choices(range(1, 30), k=random.randint(1, prompt)))),
            params=SamplingParams(
                max_tokens=random.randint(1, answer), temperature=1.0, seed=random.getrandbits(32), ignore_eos=True
            ),
            wait=True,
            streaming=random.random() < 0.5,
            salt=b"",
            tenant="",
            deadline=None,
            calm=number >= size - 2,
        )
        for number in range(size)
    )
    pressure = msgspec.structs.replace(
        scenario.pressure, num_blocks=num_blocks, block_size=4, max_model_len=4 * num_blocks, windows=(None,)
    )
    cache = msgspec.structs.replace(scenario.config.cache, block_size=4)
    stream = msgspec.structs.replace(scenario.config.stream, stall_timeout=STALL_TIMEOUT)
    config = msgspec.structs.replace(scenario.config, cache=cache, stream=stream)
    scenario = msgspec.structs.replace(scenario, asks=asks, pressure=pressure, config=config)
    return changed(scenario, max_num_seqs=8, max_num_queued_reqs=16, max_num_batched_tokens=64)


def guided(scenario: Scenario) -> Scenario:
    """The same crowd, in which every request has a guide."""
    specs = [GuideSpec(kind="regex", source=ToyGuide(rest, 4).text) for rest in range(3)]
    asks = tuple(
        msgspec.structs.replace(ask, params=msgspec.structs.replace(ask.params, guide=specs[ask.number % len(specs)]))
        for ask in scenario.asks
    )
    return msgspec.structs.replace(scenario, asks=asks)


def searching(scenario: Scenario) -> Scenario:
    """The same crowd, in which every request is a beam search."""
    asks = tuple(
        msgspec.structs.replace(
            ask,
            params=SamplingParams(
                n=1, best_of=2, use_beam_search=True, temperature=0.0, max_tokens=ask.params.max_tokens, ignore_eos=True
            ),
            streaming=False,
        )
        for ask in scenario.asks
    )
    return msgspec.structs.replace(scenario, asks=asks)


def test_C4_a_full_cache_preempts_and_everybody_finishes() -> None:
    """200 requests through 16 blocks: the tokens are those of a solo run, and nothing freezes."""
    scenario = crowd(1, size=200, num_blocks=16, prompt=20, answer=20)
    (verdict,) = assert_right([run_scenario(scenario)])
    assert verdict.finished == 200
    assert verdict.preemptions > 50


def test_C4_random_crowds_in_small_caches() -> None:
    verdicts = assert_right(
        run_scenario(crowd(seed, size=12, num_blocks=4 + seed % 8, prompt=6, answer=10)) for seed in range(60)
    )
    assert all(verdict.finished == 12 for verdict in verdicts)
    assert sum(verdict.preemptions > 0 for verdict in verdicts) > 30


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CRASHES)
@pytest.mark.parametrize("actor", [*ACTORS, "guide"])
def test_E4_each_actor_crashes_at_each_message(actor: str, kind: str, thorough: bool) -> None:
    """Every actor crashes at every message: every request is answered, and the engine serves on or has failed for good.

    Each crowd meets each message, or (not thorough) each message is met once.
    """
    stay = Fault("client", "stall", 1, span=4)  # long enough for the stall watch to look several times
    hits, enough = set(), 2 if actor in SILENT else MESSAGES
    for at, seed in product(range(1, MESSAGES + 1), range(3)):
        if not thorough and (at in hits or len(hits) == enough):
            continue
        scenario = crowd(seed, size=MESSAGES + 2, num_blocks=6, prompt=6, answer=8)
        if actor == "guide":
            scenario = guided(scenario)
        (verdict,) = assert_right([run_scenario(changed(scenario, faults=(stay, Fault(actor, kind, at))))])
        if (actor, kind) in verdict.hits:
            hits.add(at)
    assert len(hits) >= enough, f"only messages {sorted(hits)} were met"


@pytest.mark.parametrize("num_seeds", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_E7_mailboxes_of_one_message_never_deadlock(num_seeds: int) -> None:
    scenarios = [draw_scenario(seed) for seed in range(2000, 2000 + num_seeds)]
    small = [scenario for scenario in scenarios if scenario.pressure.smallest_mailboxes]
    assert len(small) > num_seeds / 4
    assert_right(run_scenario(scenario) for scenario in small)


def disturbed(fault: Fault, seed: int) -> Verdict:
    """A crowd of ten in which one thing goes wrong."""
    return run_scenario(changed(crowd(seed, size=10, num_blocks=8, prompt=6, answer=8), faults=(fault,)))


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "poison"])
def test_E1_E6_a_lost_worker_and_nonsense_replies_cost_nobody_a_request(kind: str) -> None:
    """At each of the first steps: the worker is replaced, and everybody gets the tokens of a solo run."""
    verdicts = assert_right(disturbed(Fault("worker", kind, at), seed) for at in range(1, 9) for seed in range(2))
    assert all(verdict.finished == 10 for verdict in verdicts)
    assert sum(("worker", kind) in verdict.hits for verdict in verdicts) >= 14


@pytest.mark.parametrize("kind", ["wrong_shape", "bad_id"])
def test_E6_log_probabilities_that_nobody_can_read_cost_nobody_a_request(kind: str) -> None:
    """Of beams, which live by them: at each of the first steps."""
    scenarios = [
        changed(searching(crowd(seed, size=10, num_blocks=16, prompt=6, answer=8)), faults=(Fault("worker", kind, at),))
        for at in range(1, 9)
        for seed in range(2)
    ]
    verdicts = assert_right(map(run_scenario, scenarios))
    assert all(verdict.finished == 10 for verdict in verdicts)
    assert sum(("worker", kind) in verdict.hits for verdict in verdicts) >= 14


@pytest.mark.parametrize("box", MAILBOXES)
def test_E8_a_lost_wake_up_is_mended(box: str) -> None:
    verdicts = assert_right(disturbed(Fault(box, "lost_wakeup", at), seed) for at in range(1, 6) for seed in range(2))
    assert all(verdict.finished == 10 for verdict in verdicts)
    assert sum(bool(verdict.hits) for verdict in verdicts) >= (1 if box == "intake" else 5)


def test_E10_only_the_request_that_kills_the_worker_fails() -> None:
    verdicts = assert_right(disturbed(Fault("worker", "poison", at), seed) for at in range(1, 7) for seed in range(5))
    assert all(verdict.finished >= 9 for verdict in verdicts)
    assert sum(verdict.finished == 9 for verdict in verdicts) > 20


def departures(seeds: range) -> Iterable[Verdict]:
    """Every client leaves, at a moment that the seed picks."""
    leave = (Fault("client", "disconnect", 1, span=100),)
    return (run_scenario(changed(draw_scenario(seed), faults=leave)) for seed in seeds)


@pytest.mark.parametrize("num_seeds", [50, pytest.param(300, marks=pytest.mark.slow)])
def test_D3_clients_leave_at_random_moments(num_seeds: int) -> None:
    verdicts = assert_right(departures(range(num_seeds)))
    assert sum(verdict.hits.get(("client", "disconnect"), 0) for verdict in verdicts) > 2 * num_seeds


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_D3_ten_thousand_clients_that_leave_free_everything() -> None:
    assert_right(departures(range(5000)))


def flooded(seed: int) -> Scenario:
    """One stream runs while long prompts arrive behind it; all budgets are small."""
    scenario = crowd(seed, size=10, num_blocks=200, prompt=4, answer=4)
    first, *others = scenario.asks
    stream = msgspec.structs.replace(
        first, streaming=True, params=SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    )
    random = Random(seed)
    floods = tuple(
        msgspec.structs.replace(
            ask,
            start=random.uniform(0.05, 0.2),
            prompt=TokensPrompt(tuple(random.choices(range(1, 30), k=300))),
            calm=False,
        )
        for ask in others
    )
    stream_config = msgspec.structs.replace(scenario.config.stream, stream_budget_tokens=10_000, flush_interval=0.0)
    scenario = msgspec.structs.replace(
        scenario, asks=(stream, *floods), config=msgspec.structs.replace(scenario.config, stream=stream_config)
    )
    return changed(scenario, max_num_batched_tokens=16, enable_chunked_prefill=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_D7_long_prompts_do_not_hold_up_a_running_stream(seed: int) -> None:
    """The stream has a token in every step that it can be in: no gap is longer than the plans under way."""
    scenario = flooded(seed)
    verdict = run_scenario(scenario, tracing=True)
    assert_right([verdict])
    shown = [event[0] for event in verdict.trace if event[1:3] == ("delta", 0)]
    gaps = [later - earlier for earlier, later in pairwise(shown)]
    assert len(gaps) >= 20
    longest_step = 2 * scenario.pressure.step_seconds
    assert max(gaps) <= longest_step * (1 + scenario.config.scheduler.max_plans_in_flight) + 0.01
