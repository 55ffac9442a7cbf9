"""Flags of `bench guide`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=["builtin", "125m", "tiny"], default=["builtin", "125m"])
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 32], help="requests at once")
    parser.add_argument("--output-len", type=count, default=96, help="tokens of each answer")
    parser.add_argument("--repeats", type=count, default=7, help="rounds whose medians count")
    parser.add_argument("--schema-bytes", type=count, default=5000, help="size of the new schemas")
    parser.add_argument("--schemas", type=count, default=15, help="new schemas whose first tokens are timed")
    parser.add_argument("--embedded", action="store_true", help="the model in this process, not in one of its own")
    parser.add_argument("--threads", type=count, help="threads of the model step (default: all cores)")
    parser.add_argument("--result-json", metavar="FILE")
