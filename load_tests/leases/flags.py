"""Flags of `bench leases`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=count, default=50, help="agents that take turns, one of which sends hints")
    parser.add_argument("--turns", type=count, default=30, help="turns of each session")
    parser.add_argument("--fits", type=count, default=20, help="sessions that the KV cache holds")
    parser.add_argument("--result-json", metavar="FILE")
