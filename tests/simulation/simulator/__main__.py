"""`make simulate SEEDS=20000`: search many seeds, or look at one.

Prints seeds per second of one core, how often each (actor, fault) pair went off, and every failure with its seed.
"""

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tqdm import tqdm

from simulator.faults import ALPHABET
from simulator.history import Verdict
from simulator.runner import run_seed, run_seeds

LEAST_HITS_PER_20000 = 20
_CHUNK = 50
_MOST_SHOWN = 40


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="print everything that happened in it")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _show(run_seed(options.seed, tracing=options.trace))
    return _search(range(options.first, options.first + options.seeds), options.jobs)


def _show(verdict: Verdict) -> int:
    for when, *event in verdict.trace:
        print(f"{when:10.4f}", *event)
    for failure in verdict.failures:
        print(f"seed {verdict.seed}: {failure}")
    print(f"seed {verdict.seed}: {verdict.steps} steps, {verdict.finished} answers, faults {verdict.hits}")
    return 1 if verdict.failures else 0


def _search(seeds: range, jobs: int) -> int:
    hits: Counter[tuple[str, str]] = Counter()
    failures: list[Verdict] = []
    chunks = [seeds[first : first + _CHUNK] for first in range(0, len(seeds), _CHUNK)]
    seconds = 0.0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool, tqdm(total=len(seeds), unit=" seeds", mininterval=1.0) as bar:
        for future in as_completed([pool.submit(run_seeds, chunk) for chunk in chunks]):
            if future.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            verdicts, spent = future.result()
            seconds += spent
            for verdict in verdicts:
                hits.update(verdict.hits)
                if verdict.failures:
                    failures.append(verdict)
                    bar.write(f"seed {verdict.seed}: {verdict.failures[0]}")
            bar.update(len(verdicts))
    rare = _print_coverage(hits, len(seeds))
    print(f"\n{len(seeds)} seeds, {len(seeds) / seconds:.0f} seeds/s per core, {len(failures)} failures")
    for verdict in sorted(failures, key=lambda one: one.seed)[:_MOST_SHOWN]:
        print(f"  seed {verdict.seed}: {verdict.failures[0]}")
    if rare:
        print(f"pairs hit too rarely: {', '.join(rare)}")
    return 1 if failures or rare else 0


def _print_coverage(hits: Counter[tuple[str, str]], num_seeds: int) -> list[str]:
    """The table; the pairs that so many seeds should have hit more often."""
    least = LEAST_HITS_PER_20000 * num_seeds // 20_000
    width = max(len(target) for target, _ in ALPHABET)
    print("\nhits by (actor, fault)")
    for target in dict.fromkeys(target for target, _ in ALPHABET):
        row = [f"{kind} {hits[target, kind]}" for other, kind in ALPHABET if other == target]
        print(f"  {target:{width}}  {', '.join(row)}")
    return [f"{target} {kind}" for target, kind in ALPHABET if hits[target, kind] < least]


if __name__ == "__main__":
    sys.exit(main())
