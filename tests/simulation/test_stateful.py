"""Models with states: seeds without a failure, and sequences that begin behind snapshots among them."""

from random import Random

from simulator.multipliers import draw_whole
from simulator.runner import run_scenario
from simulator.stateful import stateful
from simulator.workload import draw_scenario

SEEDS = range(24)


def test_seeds_with_states_are_clean() -> None:
    for seed in SEEDS:
        scenario = draw_scenario(seed)
        if scenario.pressure.torch:
            continue
        verdict = run_scenario(stateful(scenario, Random(seed)))
        assert not verdict.failures, f"seed {seed}: {verdict.failures}"


def test_a_part_of_all_seeds_has_states_and_none_of_them_has_drafts() -> None:
    drawn = [draw_whole(seed).pressure for seed in range(100)]
    with_states = [pressure for pressure in drawn if pressure.state_slots]
    assert 8 < len(with_states) < 32
    assert not any(pressure.drafts for pressure in with_states)
