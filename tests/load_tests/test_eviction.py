"""Traces through the host tier's policies."""

import argparse
import itertools
import json
from pathlib import Path

import pytest

from troupellm.load_tests.bench import eviction as command
from troupellm.load_tests.kv_cache.replay import optimal_hits, replay
from troupellm.load_tests.kv_cache.traces import TRACES


def best_by_search(blocks: list[int], capacity: int) -> int:
    """Every choice of victims."""
    best = {frozenset[int](): 0}
    for block in blocks:
        grown: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            if block in kept:
                choices = [(kept, hits + 1)]
            elif len(kept) < capacity:
                choices = [(kept | {block}, hits)]
            else:
                choices = [((kept - {victim}) | {block}, hits) for victim in kept]
            for state, count in choices:
                grown[state] = max(count, grown.get(state, 0))
        best = grown
    return max(best.values())


def test_the_optimum_is_one() -> None:
    for seed in range(40):
        blocks = [(seed * 7 + index * index * (seed + 3)) % 11 % 6 for index in range(24)]
        assert optimal_hits(blocks, 3) == best_by_search(blocks, 3), seed


@pytest.mark.parametrize("trace", TRACES)
def test_traces_are_the_same_every_time_and_nobody_beats_the_optimum(trace: str) -> None:
    rates = replay(trace, accesses=4000, capacity=128)
    assert rates == replay(trace, accesses=4000, capacity=128)
    assert all(rate <= rates["optimum"] for rate in rates.values())
    assert any(first != second for first, second in itertools.pairwise(rates.values()))


def test_the_command_tells_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        capacity=[128], accesses=6000, policies=["lru", "arc"], seed=0, result_json=str(tmp_path / "report.json")
    )
    assert command.run(args) == 0
    assert capsys.readouterr().out.count("kept") == 2
    assert json.loads((tmp_path / "report.json").read_text())["128"]["scan"]["arc"] > 0
    args.policies = ["arc", "lru"]
    assert command.verdict_of("scan", {"lru": 0.5, "arc": 0.4})[1] is False
    assert command.verdict_of("recency", {"lru": 0.5, "arc": 0.48})[1] is False
