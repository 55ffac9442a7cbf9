"""Flags of `bench step`."""

import argparse

from troupellm.load_tests.serve.flags import count, finite, natural

MODELS = ("24m", "125m", "qwen3-0.6b", "tiny")
LEVELS = ("worker", "engine", "http")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="24m", help=f"random: {', '.join(MODELS)}; or a checkpoint's folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--quantization", help="as of `serve`, such as int8")
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32, 64, 256], help="sequences that decode")
    parser.add_argument("--context", type=count, default=128, help="tokens of each when the clock starts")
    parser.add_argument("--steps", type=count, default=32, help="decoding steps whose median counts")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--num-threads", type=count, help="on a CPU (default: all cores)")
    parser.add_argument("--seconds", type=finite, default=0.3, help="for each ceiling")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: of a folder's config")
    parser.add_argument(
        "--beside",
        nargs="+",
        type=natural,
        metavar="N",
        help="instead: all threads against one, decoding and prompts, beside N busy programs each (0 is quiet)",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="with --beside: as of `serve`")
    parser.add_argument("--repeats", type=count, default=3, help="with --beside: turns, whose median counts")
    parser.add_argument("--result-json", metavar="FILE", help="written after every batch size")
