"""Flags of `bench heartbeat`."""

import argparse

from troupellm.load_tests.serve.flags import count, not_negative


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--streams", type=count, default=16, help="answers at once")
    parser.add_argument("--max-tokens", type=count, default=128, help="of each answer")
    parser.add_argument("--long-prompt-chars", type=count, default=100_000, help="size of the long prompts")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of the model step")
    parser.add_argument("--uvloop", action="store_true", help="host on uvloop instead of plain asyncio")
    parser.add_argument("--limit-ms", type=not_negative, default=None, help="exit with 1 when the worst lag is above")
    parser.add_argument("--result-json", metavar="FILE")
