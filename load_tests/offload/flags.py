"""Flags of `bench offload`."""

import argparse

from troupellm.load_tests.serve.flags import count

PARTS = ("host", "disk", "throughput", "crowd")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=["125m", "24m", "tiny"], default="125m", help="size of the random model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--prefix-len", type=count, default=8192, help="tokens of the prefix that is restored")
    parser.add_argument("--requests", type=count, default=48, help="requests of a round of throughput")
    parser.add_argument("--prompt-len", type=count, default=192, help="prompt tokens of each")
    parser.add_argument("--output-len", type=count, default=48, help="answer tokens of each")
    parser.add_argument("--crowd", type=count, default=200, help="requests on the pool of 16 blocks")
    parser.add_argument("--repeats", type=count, default=5, help="rounds whose medians count")
    parser.add_argument("--threads", type=count, help="threads of the model step (default: all cores)")
    parser.add_argument("--folder", help="where the disk tier lies (default: a temporary folder)")
    parser.add_argument("--result-json", metavar="FILE")
