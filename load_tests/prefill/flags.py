"""Flags of `bench prefill`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=["125m", "tiny"], default="125m", help="size of the random model")
    parser.add_argument("--prompts", type=count, default=16, help="requests that come at once")
    parser.add_argument("--prompt-len", type=count, default=128, help="tokens of each")
    parser.add_argument("--output-len", type=count, default=16, help="tokens of each answer")
    parser.add_argument("--waves", type=count, default=4, help="prompts of each client in a row, under sustained load")
    parser.add_argument("--repeats", type=count, default=5, help="rounds whose medians count")
    parser.add_argument("--threads", type=count, help="threads of the model step (default: all cores)")
    parser.add_argument("--result-json", metavar="FILE")
