"""`bench leases`: what KV leases keep for an agent, and what they cost the others. In virtual time."""

import argparse
import json
from pathlib import Path

from troupellm.load_tests.kv_cache.fleet import WATCHED, Fleet, Outcome, Shape

CACHED_WITH, CACHED_WITHOUT = 0.95, 0.10
OTHERS_SPEED, OTHERS_FIRST_TOKEN = 0.95, 1.1


def run(args: argparse.Namespace) -> int:
    """1 where a bar is missed."""
    shape = Shape(sessions=args.sessions, turns=args.turns, fits=args.fits)
    lines = compare(shape)
    print(f"{shape.sessions} sessions of {shape.turns} turns, KV cache for {shape.fits} of them, virtual time")
    for text, value, bar, kept in lines:
        print(f"{text:<70}{value:>8.3f}   {bar}: {'kept' if kept else 'MISSED'}")
    if args.result_json:
        Path(args.result_json).write_text(json.dumps({text: value for text, value, _, _ in lines}), encoding="utf-8")
    return 0 if all(kept for _, _, _, kept in lines) else 1


def compare(shape: Shape) -> list[tuple[str, float, str, bool]]:
    """Per line of the report: what it is, its value, the bar, and whether that was kept."""
    one = frozenset({WATCHED})
    without, hinted = _run(shape, 0.0, one), _run(shape, 0.5, one)
    greedy = frozenset(range(shape.sessions // 2))
    modest, grabbed = _run(shape, 0.0, greedy), _run(shape, 0.5, greedy)
    killed = Fleet(shape, fraction=0.5, hints=one, lose_at=shape.sessions).run()
    speed = hinted.others_per_second / without.others_per_second
    first = grabbed.first_token / modest.first_token
    return [
        (
            "share of a turn's past that is cached, with hints",
            hinted.cached,
            f">= {CACHED_WITH:g}",
            hinted.cached >= CACHED_WITH,
        ),
        ("the same without leases", without.cached, f"<= {CACHED_WITHOUT:g}", without.cached <= CACHED_WITHOUT),
        (
            "tokens/s of the other sessions, with hints over without",
            speed,
            f">= {OTHERS_SPEED:g}",
            speed >= OTHERS_SPEED,
        ),
        (
            "their time to the first token beside a key that leases all",
            first,
            f"<= {OTHERS_FIRST_TOKEN:g}",
            first <= OTHERS_FIRST_TOKEN,
        ),
        (
            "equal answers after the worker was killed",
            float(killed.answers == without.answers),
            "= 1",
            killed.answers == without.answers == hinted.answers,
        ),
    ]


def _run(shape: Shape, fraction: float, hints: frozenset[int]) -> Outcome:
    return Fleet(shape, fraction=fraction, hints=hints).run()
