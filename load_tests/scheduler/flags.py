"""Flags of `bench scheduler`."""

import argparse

from troupellm.load_tests.serve.flags import count, natural


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=count, nargs="+", default=[64, 256, 1024], help="sequences at once")
    parser.add_argument("--prompt-tokens", type=count, default=8192, help="length of the prompts that are admitted")
    parser.add_argument("--window-steps", type=count, default=64, help="steps that make one window")
    parser.add_argument("--windows", type=count, default=15, help="windows whose median counts")
    parser.add_argument("--admissions", type=count, default=25, help="prompts of each kind whose median counts")
    parser.add_argument("--drafts", type=natural, default=0, help="also the same steps with so many drafts per row")
    parser.add_argument("--no-chain", action="store_true", help="leave out the whole actor chain (seconds per row)")
    parser.add_argument("--against-vllm", action="store_true", help="the same shapes through vLLM's scheduler")
    parser.add_argument("--result-json", metavar="FILE")
