"""Flags of the benchmarks of KV blocks that outlive their request."""

import argparse

from troupellm.load_tests.flags.values import count

OFFLOAD_PARTS = ("host", "disk", "throughput", "crowd")


def eviction(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capacity", type=count, nargs="+", default=[512, 2048], help="blocks that the tier holds")
    parser.add_argument("--accesses", type=count, default=100_000, help="blocks asked for in a trace")
    parser.add_argument("--policies", nargs="+", default=["lru", "arc"], help="lru, arc, or names of plug-ins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE")


def leases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=count, default=50, help="agents that take turns, one of which sends hints")
    parser.add_argument("--turns", type=count, default=30, help="turns of each session")
    parser.add_argument("--fits", type=count, default=20, help="sessions that the KV cache holds")
    parser.add_argument("--result-json", metavar="FILE")


def offload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=["125m", "24m", "tiny"], default="125m", help="size of the random model")
    parser.add_argument(
        "--parts", nargs="+", choices=OFFLOAD_PARTS, default=list(OFFLOAD_PARTS), help="what to measure"
    )
    parser.add_argument("--prefix-len", type=count, default=8192, help="tokens of the prefix that is restored")
    parser.add_argument("--requests", type=count, default=48, help="requests of a round of throughput")
    parser.add_argument("--prompt-len", type=count, default=192, help="prompt tokens of each")
    parser.add_argument("--output-len", type=count, default=48, help="answer tokens of each")
    parser.add_argument("--crowd", type=count, default=200, help="requests on the pool of 16 blocks")
    parser.add_argument("--repeats", type=count, default=5, help="rounds whose medians count")
    parser.add_argument("--threads", type=count, help="threads of the model step (default: all cores)")
    parser.add_argument("--folder", help="where the disk tier lies (default: a temporary folder)")
    parser.add_argument("--result-json", metavar="FILE")


def handover(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--connector", choices=("tcp-peer", "shared-directory"), default="tcp-peer")
    parser.add_argument("--prompt-tokens", type=count, default=512, help="of each prompt")
    parser.add_argument("--max-tokens", type=count, default=32, help="of each answer")
    parser.add_argument("--prompts", type=count, default=4, help="one after the other")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of each engine")
    parser.add_argument("--result-json", metavar="FILE")
