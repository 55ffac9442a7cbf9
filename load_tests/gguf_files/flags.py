"""Flags of `bench gguf`."""

import argparse

from troupellm.load_tests.serve.flags import count, natural

CONFIGS = ("125m", "qwen3-0.6b", "24m", "tiny")
TYPES = ("q4_0", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs")
CONTESTANTS = ("troupellm", "llama")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=list(CONFIGS[:2]), help="random models")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="of the random models' files")
    parser.add_argument("--files", nargs="+", default=[], metavar="FILE", help="GGUF files that are there, beside them")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--gguf-inputs", choices=("int16", "int8"), default="int16", help="the setting of our engine")
    parser.add_argument("--sequences", nargs="+", type=count, default=[1, 8, 32], help="answers at once, a cell each")
    parser.add_argument("--input-len", type=count, default=128, help="prompt tokens of the decoding cells")
    parser.add_argument("--output-len", type=count, default=128, help="tokens of each answer")
    parser.add_argument("--prefill-len", type=natural, default=512, help="prompt of the prefill cell; 0 leaves it out")
    parser.add_argument("--rounds", type=count, default=3, help="interleaved runs whose median counts")
    parser.add_argument("--num-threads", type=count, default=None, help="of every contestant (default: all cores)")
    parser.add_argument("--peers-dir", default=".venv-peers", help="where `make peers` put their environments")
    parser.add_argument("--work-dir", help="folder that keeps the models for another time (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE", help="written after every cell")
