"""Flags of `bench sse`."""

import argparse

from troupellm.load_tests.serve.flags import count, finite, natural, not_negative


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--readers", type=count, default=256, help="streams that are read at once")
    parser.add_argument("--seconds", type=finite, default=8.0, help="of each measurement, after its warm-up")
    parser.add_argument("--warm-up-sec", type=not_negative, default=2.0, help="before each measurement")
    parser.add_argument("--step-ms", type=not_negative, default=4.0, help="time between steps of the instant worker")
    parser.add_argument("--flush-ms", type=not_negative, default=20.0, help="flush interval of streams")
    parser.add_argument(
        "--stalled", type=natural, default=500, help="readers that never read, for the memory; 0 skips it"
    )
    parser.add_argument("--repeats", type=natural, default=3, help="of the costs, whose median counts; 0 skips them")
    parser.add_argument(
        "--fronts",
        type=natural,
        default=0,
        help="HTTP in so many processes of its own; then their CPU time alone counts",
    )
    parser.add_argument("--result-json", metavar="FILE")
