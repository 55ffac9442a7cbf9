"""Flags of `bench overlap`."""

import argparse

from troupellm.load_tests.serve.flags import count, finite, not_negative

SEATS = ("thread", "process")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seats", nargs="+", choices=SEATS, default=list(SEATS), help="where the worker lives")
    parser.add_argument("--running", nargs="+", type=count, default=[32, 256], help="sequences that decode")
    parser.add_argument(
        "--device-ms", nargs="+", type=finite, default=[0.7, 5.0, 15.0], help="what the device takes for a step"
    )
    parser.add_argument("--launch-us", type=not_negative, default=250.0, help="what a launch takes of the processor")
    parser.add_argument("--window-steps", type=count, default=60, help="steps that make one window")
    parser.add_argument("--windows", type=count, default=5, help="windows whose median counts")
    parser.add_argument("--flush-ms", type=not_negative, default=20.0, help="flush interval of streams")
    parser.add_argument("--time-limit-sec", type=finite, default=120.0, help="of one measurement")
    parser.add_argument("--result-json", metavar="FILE")
