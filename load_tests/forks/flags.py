"""Flags of `bench forks`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=("builtin", "125m", "tiny"), default="builtin", help="the built-in or a random model"
    )
    parser.add_argument("--prompt-len", type=count, default=512, help="tokens of the prompt")
    parser.add_argument("--output-len", type=count, default=64, help="tokens of each answer")
    parser.add_argument("--forks", type=count, default=8, help="answers (n) to the one prompt")
    parser.add_argument("--beams", type=count, default=4, help="width of the search")
    parser.add_argument("--against-transformers", action="store_true", help="search with transformers as well")
    parser.add_argument("--embedded", action="store_true", help="the model on a thread instead of in a process")
    parser.add_argument("--repeats", type=count, default=5, help="rounds whose medians count")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of all; default: all cores")
    parser.add_argument("--result-json", metavar="FILE")
