"""Front processes in the simulation: what falls with one and what does not; other seeds know nothing of them."""

import msgspec
import pytest
from simulator.adapted import draw_adapted
from simulator.faults import FRONT_FAULTS, Fault
from simulator.fronted import draw_seed
from simulator.runner import run_scenario
from simulator.workload import Scenario
from test_rows import assert_right, crowd

CLIENTS = 18
"""Every other one comes through a front, and the last two come in the calm."""
OCCASIONS = range(1, 9)
"""At each of which the fault goes off once."""


def through_fronts(seed: int, *faults: Fault) -> Scenario:
    """A crowd with two fronts, to which nothing else happens."""
    scenario = crowd(seed, size=CLIENTS, num_blocks=8, prompt=6, answer=8)
    asks = tuple(msgspec.structs.replace(ask, front=ask.number % 2 == 0) for ask in scenario.asks)
    pressure = msgspec.structs.replace(scenario.pressure, fronts=2)
    return msgspec.structs.replace(scenario, asks=asks, pressure=pressure, faults=faults)


def without_fronts(scenario: Scenario) -> Scenario:
    asks = tuple(msgspec.structs.replace(ask, front=False) for ask in scenario.asks)
    faults = tuple(fault for fault in scenario.faults if fault.target != "front")
    pressure = msgspec.structs.replace(scenario.pressure, fronts=0)
    return msgspec.structs.replace(scenario, asks=asks, pressure=pressure, faults=faults)


def test_answers_through_fronts_are_those_of_a_solo_run() -> None:
    verdicts = assert_right(run_scenario(through_fronts(seed)) for seed in range(20))
    assert all(verdict.finished == CLIENTS for verdict in verdicts)


@pytest.mark.parametrize("kind", [kind for kind in FRONT_FAULTS if kind != "slow"])
def test_a_front_that_falls_takes_only_its_own_clients_along(kind: str) -> None:
    """They are told so; all others get the tokens of a solo run."""
    verdicts = assert_right(
        run_scenario(through_fronts(seed, Fault("front", kind, at))) for at in OCCASIONS for seed in range(2)
    )
    assert sum(("front", kind) in verdict.hits for verdict in verdicts) >= 14
    assert CLIENTS // 2 <= min(verdict.finished for verdict in verdicts) < CLIENTS


def test_a_slow_wire_costs_nobody_an_answer() -> None:
    verdicts = assert_right(
        run_scenario(through_fronts(seed, Fault("front", "slow", at, span=3, seconds=0.5)))
        for at in OCCASIONS
        for seed in range(2)
    )
    assert all(verdict.finished == CLIENTS for verdict in verdicts)
    assert sum(("front", "slow") in verdict.hits for verdict in verdicts) >= 14


def test_a_seed_without_fronts_is_what_it_was() -> None:
    drawn = [(draw_adapted(seed), draw_seed(seed)) for seed in range(400)]
    assert 25 < sum(new.pressure.fronts > 0 for _, new in drawn) < 75
    assert all(without_fronts(new) == old for old, new in drawn)
