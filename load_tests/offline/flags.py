"""Flags of `bench offline`."""

import argparse

from troupellm.load_tests.serve.flags import count, natural

CONFIGS = ("24m", "125m", "qwen3-0.6b", "tiny")
CONTESTANTS = ("troupellm", "openvino", "vllm", "llama", "transformers")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS[:3]), help="random models")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "int8"), default=["fp32", "int8"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--sequences", nargs="+", type=count, default=[1, 8, 32], help="answers at once, a cell each")
    parser.add_argument("--input-len", type=count, default=128, help="prompt tokens of the decoding cells")
    parser.add_argument("--output-len", type=count, default=128, help="tokens of each answer")
    parser.add_argument("--prefill-len", type=natural, default=1024, help="prompt of the prefill cell; 0 leaves it out")
    parser.add_argument("--rounds", type=count, default=3, help="interleaved runs whose median counts")
    parser.add_argument("--num-threads", type=count, default=None, help="of every contestant (default: all cores)")
    parser.add_argument("--peers-dir", default=".venv-peers", help="where `make peers` put their environments")
    parser.add_argument("--work-dir", help="folder that keeps the models for another time (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE", help="written after every cell")
