"""KV hints in the simulation: leases, prefetches and dropped sessions are at work, and answers are what they were."""

from random import Random

from simulator.hinted import hinted
from simulator.multipliers import tiered
from simulator.runner import run_scenario
from simulator.workload import draw_scenario
from test_search import judged

SEEDS = 30


def test_hints_change_no_answer_and_lose_no_block() -> None:
    told = []
    for seed in range(SEEDS):
        scenario, random = draw_scenario(seed), Random(seed)
        if not scenario.pressure.torch:
            scenario = tiered(scenario, random) if seed % 4 else scenario
            told.append(run_scenario(hinted(scenario, random)))
    judged(told)
    assert sum(verdict.leased for verdict in told) > SEEDS
    assert sum(verdict.prefetched for verdict in told) > 0
