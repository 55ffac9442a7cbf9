"""Flags of `bench input`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model with a context of 2**20 tokens")
    parser.add_argument("--mebibytes", type=count, default=8, help="size of the body that each route gets")
    parser.add_argument("--rounds", type=count, default=3, help="bodies that each route gets, one after another")
    parser.add_argument("--serve-arg", action="append", default=[], metavar="FLAG", help="for the server")
    parser.add_argument("--result-json", metavar="FILE")
