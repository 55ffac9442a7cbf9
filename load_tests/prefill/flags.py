"""Flags of `bench prefill`."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=["125m", "tiny"], default="125m", help="size of the random model")
    parser.add_argument("--prompts", type=int, default=16, help="requests that come at once")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of each")
    parser.add_argument("--output-len", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5, help="rounds whose medians count")
    parser.add_argument("--threads", type=int, help="threads of the model step (default: all cores)")
    parser.add_argument("--result-json", metavar="FILE")
