"""Flags of `bench heartbeat`."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--streams", type=int, default=16, help="answers at once")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--long-prompt-chars", type=int, default=100_000, help="size of the long prompts")
    parser.add_argument("--num-threads", type=int, default=None, help="torch threads of the model step")
    parser.add_argument("--uvloop", action="store_true", help="host on uvloop instead of plain asyncio")
    parser.add_argument("--limit-ms", type=float, default=None, help="exit with 1 when the worst lag is above")
    parser.add_argument("--result-json", metavar="FILE")
