"""Flags of `bench chain`."""

import argparse

from troupellm.load_tests.serve.flags import count, finite, not_negative


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=count, nargs="+", default=[8, 64, 256, 1024], help="sequences at once")
    parser.add_argument(
        "--flush-ms", type=not_negative, nargs="+", default=[20.0, 0.0], help="flush intervals of streams"
    )
    parser.add_argument(
        "--plain-interval",
        action="store_true",
        help="the interval as it is, not less for few streams and more for many",
    )
    parser.add_argument("--window-steps", type=count, default=200, help="steps that make one window")
    parser.add_argument("--windows", type=count, default=7, help="windows whose median counts")
    parser.add_argument("--step-ms", type=not_negative, default=0.0, help="time that a device takes for a step")
    parser.add_argument("--time-limit-sec", type=finite, default=120.0, help="of one measurement")
    parser.add_argument("--result-json", metavar="FILE")
