"""`bench eviction`: hit rates of the host tier's policies on generated traces, beside the optimum."""

import argparse
import json
from pathlib import Path

from troupellm.load_tests.kv_cache.replay import OPTIMUM, replay
from troupellm.load_tests.kv_cache.traces import TRACES

_CLOSE = 0.98


def run(args: argparse.Namespace) -> int:
    """1 where arc does not beat lru on the scan-polluted trace, or is more than 2 % below it on that of recency."""
    report: dict[str, dict[str, dict[str, float]]] = {}
    kept = True
    columns = [*args.policies, OPTIMUM]
    for capacity in args.capacity:
        print(f"{capacity:,} blocks, {args.accesses:,} accesses: hit rates in per cent")
        print(f"{'trace':>10}" + "".join(f"{name:>10}" for name in columns))
        for trace in TRACES:
            rates = replay(
                trace, accesses=args.accesses, capacity=capacity, policies=tuple(args.policies), seed=args.seed
            )
            report.setdefault(str(capacity), {})[trace] = rates
            verdict, passed = verdict_of(trace, rates)
            kept = kept and passed
            print(f"{trace:>10}" + "".join(f"{100 * rates[name]:>10.2f}" for name in columns) + verdict, flush=True)
        print()
    if args.result_json:
        Path(args.result_json).write_text(json.dumps(report), encoding="utf-8")
    return 0 if kept else 1


def verdict_of(trace: str, rates: dict[str, float]) -> tuple[str, bool]:
    lru, arc = rates.get("lru"), rates.get("arc")
    if not lru or arc is None or trace not in ("scan", "recency"):
        return "", True
    passed = arc > lru if trace == "scan" else arc >= _CLOSE * lru
    wanted = "more than lru" if trace == "scan" else f"at least {_CLOSE:g}x"
    return f"   arc {arc / lru:.3f}x lru, wanted {wanted}: {'kept' if passed else 'MISSED'}", passed
