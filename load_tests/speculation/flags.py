"""Flags of `bench speculation`."""

import argparse

from troupellm.load_tests.serve.flags import count, finite

PARTS = ("ngram", "suffix", "eagle", "medusa", "draft_model", "synthetic", "sweep")
METHODS = ("ngram", "suffix", "eagle", "medusa", "draft_model")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--rounds", type=count, default=7, help="interleaved rounds whose median ratio counts")
    parser.add_argument(
        "--prompts", type=count, default=8, help="answers per round and workload, or per kind of prompt"
    )
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "int8"), default=["fp32", "int8"])
    parser.add_argument("--config", default="125m", choices=("125m", "24m", "tiny"), help="random model of `synthetic`")
    parser.add_argument("--synthetic-length", type=finite, default=3.0, help="mean tokens of a step, with 4 drafts")
    parser.add_argument("--output-len", type=count, default=96, help="tokens of an answer of `synthetic` and `sweep`")
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 2, 4, 8, 16, 32], help="sequences of `sweep`")
    parser.add_argument("--sweep-methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--num-threads", type=count, help="of each engine (default: all cores)")
    parser.add_argument("--embedded", action="store_true", help="workers on threads of this process")
    parser.add_argument("--result-json", metavar="FILE", help="written after every part")
