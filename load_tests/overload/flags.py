"""Flags of `bench overload`."""

import argparse

from troupellm.load_tests.serve.flags import count, finite, natural


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-ms", type=finite, default=10.0, help="time that every step of the worker takes")
    parser.add_argument("--max-num-seqs", type=count, default=8, help="sequences in one step")
    parser.add_argument("--max-num-queued-reqs", type=natural, default=16, help="requests that may wait beyond those")
    parser.add_argument("--output-len", type=count, default=16, help="tokens of each answer")
    parser.add_argument("--factor", type=finite, default=5.0, help="open-loop load over the capacity")
    parser.add_argument("--seconds", type=finite, default=4.0, help="length of each phase")
    parser.add_argument("--ttft-ms", type=finite, default=1000.0, help="an answer that begins later is no good one")
    parser.add_argument("--result-json", metavar="FILE")
