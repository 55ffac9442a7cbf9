"""Flags of the benchmarks that start a server of their own."""

import argparse

from troupellm.load_tests.flags.values import count, finite, natural, not_negative

HOSTILE_PARTS = ("schemas", "lists", "chats", "bodies")
RECOVERY_SIDES = ("spare", "no-spare")


def hostile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    parser.add_argument(
        "--parts", nargs="+", choices=HOSTILE_PARTS, default=list(HOSTILE_PARTS), help="which floods to send"
    )
    parser.add_argument("--clients", type=count, nargs="+", default=[12, 24], help="clients that send a schema each")
    parser.add_argument("--schema-bytes", type=count, default=188_000, help="size of each of their schemas")
    parser.add_argument("--prompts", type=count, default=128, help="prompts of one list")
    parser.add_argument("--bodies", type=count, default=150, help="clients that send a large body each")
    parser.add_argument("--body-bytes", type=count, default=7 * 2**20, help="size of each of their bodies")
    parser.add_argument("--rounds", type=count, default=20, help="short requests of the other key beside each flood")
    parser.add_argument("--serve-arg", action="append", default=[], metavar="FLAG", help="for the server")
    parser.add_argument("--result-json", metavar="FILE")


def long_bodies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model with a context of 2**20 tokens")
    parser.add_argument("--mebibytes", type=count, default=8, help="size of the body that each route gets")
    parser.add_argument("--rounds", type=count, default=3, help="bodies that each route gets, one after another")
    parser.add_argument("--serve-arg", action="append", default=[], metavar="FLAG", help="for the server")
    parser.add_argument("--result-json", metavar="FILE")


def overload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-ms", type=finite, default=10.0, help="time that every step of the worker takes")
    parser.add_argument("--max-num-seqs", type=count, default=8, help="sequences in one step")
    parser.add_argument("--max-num-queued-reqs", type=natural, default=16, help="requests that may wait beyond those")
    parser.add_argument("--output-len", type=count, default=16, help="tokens of each answer")
    parser.add_argument("--factor", type=finite, default=5.0, help="open-loop load over the capacity")
    parser.add_argument("--seconds", type=finite, default=4.0, help="length of each phase")
    parser.add_argument("--ttft-ms", type=finite, default=1000.0, help="an answer that begins later is no good one")
    parser.add_argument("--result-json", metavar="FILE")


def recovery(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=RECOVERY_SIDES,
        default=list(RECOVERY_SIDES),
        help="with and without a spare worker",
    )
    parser.add_argument("--rounds", type=count, default=3, help="kills of each side, a fresh server for each")
    parser.add_argument("--streams", type=count, default=32, help="answers that are under way at the kill")
    parser.add_argument("--max-tokens", type=count, default=256, help="of each answer")
    parser.add_argument(
        "--serve-arg",
        action="append",
        default=[],
        metavar="FLAG",
        help="for the servers, such as --serve-arg=--batch-invariant",
    )
    parser.add_argument(  # so that the refusal says why
        "--no-worker-process",
        dest="serve_arg",
        action="append_const",
        const="--no-worker-process",
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--result-json", metavar="FILE")


def soak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=finite, default=20.0, help="how long the traffic lasts, without the warm-up")
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--concurrency", type=count, default=12, help="clients at once")
    parser.add_argument(
        "--kill-every", type=not_negative, default=20.0, help="seconds between worker kills; 0 is never"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument(
        "--serve-arg",
        action="append",
        default=[],
        metavar="FLAG",
        help="for the server, such as --serve-arg=--port=9000",
    )
    parser.add_argument("--max-slope", type=not_negative, default=1.0, help="MiB/min of memory above which it fails")
    parser.add_argument("--result-json", metavar="FILE")


def sse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--readers", type=count, default=256, help="streams that are read at once")
    parser.add_argument("--seconds", type=finite, default=8.0, help="of each measurement, after its warm-up")
    parser.add_argument("--warm-up-sec", type=not_negative, default=2.0, help="before each measurement")
    parser.add_argument("--step-ms", type=not_negative, default=4.0, help="time between steps of the instant worker")
    parser.add_argument("--flush-ms", type=not_negative, default=20.0, help="flush interval of streams")
    parser.add_argument(
        "--stalled", type=natural, default=500, help="readers that never read, for the memory; 0 skips it"
    )
    parser.add_argument("--repeats", type=natural, default=3, help="of the costs, whose median counts; 0 skips them")
    parser.add_argument(
        "--fronts",
        type=natural,
        default=0,
        help="HTTP in so many processes of its own; then their CPU time alone counts",
    )
    parser.add_argument("--result-json", metavar="FILE")


def start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--rounds", type=count, default=5, help="starts whose medians count")
    parser.add_argument(
        "--serve-arg",
        action="append",
        default=[],
        metavar="FLAG",
        help="for the server, such as --serve-arg=--no-worker-process",
    )
    parser.add_argument("--result-json", metavar="FILE")
