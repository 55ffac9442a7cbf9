"""Additions to the workload of some of the seeds: clients of front processes, which fall.

Drawn apart, so that a seed without fronts stays what it was.
"""

from random import Random

import msgspec

from simulator.adapted import draw_adapted
from simulator.faults import FRONT_FAULTS, Fault
from simulator.workload import Scenario

FRONTED_SHARE = 0.12
_CLIENTS_SHARE = 0.85
"""The others ask the engine where it lives, as a batch does."""


def draw_seed(seed: int) -> Scenario:
    """A seed as the search runs it."""
    scenario, random = draw_adapted(seed), Random(seed ^ 0xF407)
    if scenario.pressure.torch or random.random() >= FRONTED_SHARE:
        return scenario
    return fronted(scenario, random)


def fronted(scenario: Scenario, random: Random) -> Scenario:
    """The same scenario, most of whose clients come through fronts."""
    pressure = msgspec.structs.replace(scenario.pressure, fronts=random.choice((1, 1, 2)))
    asks = tuple(msgspec.structs.replace(ask, front=random.random() < _CLIENTS_SHARE) for ask in scenario.asks)
    num_faults = random.choice((0, 1, 1, 2, 3)) if scenario.faults else 0
    faults = (*scenario.faults, *(_draw_fault(random) for _ in range(num_faults)))
    return msgspec.structs.replace(scenario, pressure=pressure, asks=asks, faults=faults)


def _draw_fault(random: Random) -> Fault:
    """A wire is slow for less time in all than questions are given."""
    kind, at = random.choice(FRONT_FAULTS), 1 + int(random.expovariate(0.15))
    return Fault("front", kind, at, random.choice((1, 2, 3)) if kind == "slow" else 1, random.choice((0.02, 0.1, 0.5)))
