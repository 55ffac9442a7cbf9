"""Drafts and tiers in the simulation: they are really at work, and every fault of every tier goes off."""

from collections import Counter
from random import Random

import msgspec
import pytest
from simulator.faults import HOST, TIER_ALPHABET, Fault
from simulator.history import Verdict
from simulator.multipliers import drafting, draw_whole, tiered
from simulator.runner import run_scenario
from simulator.workload import Scenario, draw_scenario
from test_search import judged, search

DEEPER_SLEEPS = 12
TRIES = 60
"""Seeds in which a fault may go off."""


def troubled(seed: int, pair: tuple[str, str]) -> Scenario:
    """A scenario in which nothing goes wrong but that."""
    target, kind = pair
    random = Random(seed)
    scenario = tiered(msgspec.structs.replace(draw_scenario(seed), faults=()), random)
    outer = scenario.pressure.outer if target in (HOST, *scenario.pressure.outer) else (target,)
    pressure = msgspec.structs.replace(scenario.pressure, torch=False, outer=outer)
    return msgspec.structs.replace(scenario, pressure=pressure, faults=(Fault(target, kind, 1 + seed % 2),))


@pytest.mark.parametrize("pair", TIER_ALPHABET, ids="-".join)
def test_every_fault_of_every_tier_goes_off_alone(pair: tuple[str, str]) -> None:
    for seed in range(TRIES):
        if judged([run_scenario(troubled(seed, pair))])[pair]:
            return
    raise AssertionError(f"{pair} did not go off in {TRIES} seeds")


def test_drafts_are_verified_and_blocks_come_back() -> None:
    told: list[Verdict] = []
    for seed in range(40):
        scenario, random = draw_scenario(seed), Random(seed)
        if not scenario.pressure.torch:
            told.append(run_scenario(tiered(drafting(scenario, random), random)))
    judged(told)
    assert sum(verdict.accepted for verdict in told) > 200
    assert sum(verdict.loads for verdict in told) > 25


def test_drafts_and_tiers_are_drawn_independently() -> None:
    kinds: Counter[tuple[bool, bool]] = Counter()
    for seed in range(400):
        pressure = draw_whole(seed).pressure
        kinds[pressure.drafts > 0, pressure.host_slots > 0] += 1
    assert len(kinds) == 4
    assert min(kinds.values()) > 25, kinds


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_fault_of_every_tier_goes_off_often() -> None:
    hits = search(range(20_000, 26_000))
    assert {pair: hits[pair] for pair in TIER_ALPHABET if hits[pair] < 20} == {}


def test_host_memory_is_forgotten_when_a_sleep_gets_deeper() -> None:
    """A light sleep keeps it, and a deeper one that follows does not: then nothing of it may be loaded."""
    told = [run_scenario(troubled(seed, (HOST, "sleep"))) for seed in range(DEEPER_SLEEPS)]
    assert judged(told)[HOST, "sleep"] > DEEPER_SLEEPS // 5
