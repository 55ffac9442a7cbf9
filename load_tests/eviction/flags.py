"""Flags of `bench eviction`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capacity", type=count, nargs="+", default=[512, 2048], help="blocks that the tier holds")
    parser.add_argument("--accesses", type=count, default=100_000, help="blocks asked for in a trace")
    parser.add_argument("--policies", nargs="+", default=["lru", "arc"], help="lru, arc, or names of plug-ins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE")
