"""Flags of `bench guide`."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=["builtin", "125m", "tiny"], default=["builtin", "125m"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32], help="requests at once")
    parser.add_argument("--output-len", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=7, help="rounds whose medians count")
    parser.add_argument("--schema-bytes", type=int, default=5000, help="size of the new schemas")
    parser.add_argument("--schemas", type=int, default=15, help="new schemas whose first tokens are timed")
    parser.add_argument("--embedded", action="store_true", help="the model in this process, not in one of its own")
    parser.add_argument("--threads", type=int, help="threads of the model step (default: all cores)")
    parser.add_argument("--result-json", metavar="FILE")
