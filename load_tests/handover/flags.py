"""Flags of `bench handover`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--connector", choices=("tcp-peer", "shared-directory"), default="tcp-peer")
    parser.add_argument("--prompt-tokens", type=count, default=512, help="of each prompt")
    parser.add_argument("--max-tokens", type=count, default=32, help="of each answer")
    parser.add_argument("--prompts", type=count, default=4, help="one after the other")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of each engine")
    parser.add_argument("--result-json", metavar="FILE")
