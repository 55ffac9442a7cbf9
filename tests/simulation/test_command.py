"""The output and exit code of `make simulate`: the search is made up here, other tests run the seeds."""

import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

import pytest
from simulator import __main__ as command
from simulator.faults import ALPHABET
from simulator.history import Verdict

Pair = tuple[str, str]


class Here:
    """A pool of processes that is this process."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`make simulate` with seeds that take a hundredth of a second each and hit every pair once."""

    def run(*flags: str, failing: int | None = None, never: Pair | None = None) -> int:
        hits = {pair: 1 for pair in ALPHABET if pair != never}

        def verdict(seed: int) -> Verdict:
            failures = ("1: a block is owned twice",) if seed == failing else ()
            return Verdict(
                seed=seed,
                failures=failures,
                hits=hits,
                trace=(),
                virtual_seconds=0.0,
                steps=1,
                finished=1,
                preemptions=0,
                accepted=0,
                loads=0,
                leased=0,
                prefetched=0,
            )

        monkeypatch.setattr(command, "ProcessPoolExecutor", Here)
        monkeypatch.setattr(command, "run_seeds", lambda seeds: ([verdict(seed) for seed in seeds], 0.01 * len(seeds)))
        return command.main(flags)

    return run


def test_speed_and_coverage_are_told(search: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert search("--seeds", "1000") == 0
    out = capsys.readouterr().out
    assert "\n1000 seeds, 100 seeds/s per core, 0 failures\n" in out
    for target, kind in ALPHABET:
        assert re.search(rf"^  {target} .*\b{kind} 1000\b", out, re.MULTILINE), (target, kind)


def test_a_failure_is_told_with_its_seed(search: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert search("--seeds", "100", "--first", "50", failing=77) == 1
    out = capsys.readouterr().out
    assert "100 seeds, 100 seeds/s per core, 1 failures\n  seed 77: 1: a block is owned twice\n" in out


@pytest.mark.parametrize(("seeds", "code"), [("1000", 1), ("999", 0)])
def test_a_pair_that_is_hit_too_rarely_is_told_where_there_are_seeds_enough(
    search: Callable[..., int], capsys: pytest.CaptureFixture[str], seeds: str, code: int
) -> None:
    """At least 20 of 20,000."""
    assert command.LEAST_HITS_PER_20000 == 20
    assert search("--seeds", seeds, never=("pool", "exception")) == code
    assert ("pairs hit too rarely: pool exception" in capsys.readouterr().out) == bool(code)


def test_one_seed_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "17", "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20
    assert re.fullmatch(r"seed 17: \d+ steps, \d+ answers, faults .*", lines[-1])
