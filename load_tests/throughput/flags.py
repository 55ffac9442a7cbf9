"""Flags of `bench throughput`."""

import argparse

from troupellm.load_tests.serve.flags import count

CONTESTANTS = ("troupellm", "generate", "continuous", "troupellm-one", "generate-one")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=("125m", "tiny"), default="125m", help="size of the random model")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--num-requests", type=count, default=64)
    parser.add_argument("--input-len", type=count, nargs=2, default=[16, 512], metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=count, nargs=2, default=[16, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--one-input-len", type=count, default=128, help="prompt of the one-request case")
    parser.add_argument("--one-output-len", type=count, default=128, help="answer of the one-request case")
    parser.add_argument("--batch-size", type=count, default=32, help="static batches of transformers.generate")
    parser.add_argument("--continuous-page-size", type=count, default=256, help="of transformers' continuous batching")
    parser.add_argument("--continuous-batch-tokens", type=count, default=2048, help="tokens in one of its batches")
    parser.add_argument("--repeats", type=count, default=5, help="interleaved runs whose median counts")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of all; default: all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE")
