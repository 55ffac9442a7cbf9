"""Flags of `bench serve`: vLLM's spelling and meaning where both have them."""

import argparse
import math

from troupellm.load_tests.client.datasets import DATASET_NAMES
from troupellm.load_tests.client.metrics import METRICS, QUEUE_METRICS
from troupellm.load_tests.flags.values import count, json_object, natural, not_negative, pair, positive, ratio

MAX_PROMPTS = 100_000
MAX_SECONDS = 7200.0
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Sent as they are where they are given; the server says what they may be."""


def serve(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--backend", choices=("openai", "vllm", "openai-chat"), default="openai", help="completions (twice), or chat"
    )
    server.add_argument("--base-url", help="instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--endpoint", help="default: /v1/completions or /v1/chat/completions")
    server.add_argument("--model", help="default: the first one the server lists")
    server.add_argument("--served-model-name", help="what requests call the model (default: --model)")
    server.add_argument("--api-key", help="default: OPENAI_API_KEY")
    server.add_argument("--header", nargs="*", type=pair, default=[], metavar="KEY=VALUE", help="of every request")
    server.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of each body")
    server.add_argument("--temperature", type=float, default=0.0)
    server.add_argument("--top-k", type=int)
    for name in SAMPLING:
        if name != "top_k":
            server.add_argument("--" + name.replace("_", "-"), type=float)
    server.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers have exactly the wanted length, or fail (default: where the data set is random)",
    )
    server.add_argument("--allow-remote", action="store_true", help="let the load leave this machine")
    server.add_argument(
        "--ready-check-timeout-sec", type=not_negative, default=60.0, help="0 does not wait for the server"
    )
    server.add_argument("--request-timeout-sec", type=positive, default=300.0, help="for one whole answer")
    server.add_argument("--max-duration-sec", type=positive, default=600.0, help="for the whole run")
    _load(parser)
    _dataset(parser)
    _report(parser)
    _peers(parser)


def _peers(parser: argparse.ArgumentParser) -> None:
    peers = parser.add_argument_group("peers", "with --peers: servers of its own, in turn, on random models")
    peers.add_argument("--peers", nargs="*", metavar="SERVER", help="which; none: all of ours, llama-server and vLLM")
    peers.add_argument("--configs", nargs="+", choices=("24m", "125m", "tiny"), default=["24m", "125m"])
    peers.add_argument("--streams", type=count, default=16, help="requests at once, where tokens/s are counted")
    peers.add_argument("--one-requests", type=count, default=8, help="requests one by one, where times are taken")
    peers.add_argument("--rounds", type=count, default=3, help="interleaved runs whose median counts")
    peers.add_argument("--num-threads", type=count, help="of every server (default: all cores)")
    peers.add_argument("--peers-dir", default=".venv-peers", help="where `make peers` put their environments")
    peers.add_argument("--work-dir", help="folder that keeps the models for another time (default: a temporary one)")
    peers.add_argument("--result-json", metavar="FILE")


def _load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=count, default=100)
    load.add_argument("--request-rate", type=positive, default=math.inf, help="requests/s; inf sends all at once")
    load.add_argument("--burstiness", type=positive, default=1.0, help="1 is Poisson, less comes in bursts")
    load.add_argument("--max-concurrency", type=count, help="requests in flight at most")
    load.add_argument("--ramp-up-strategy", choices=("linear", "exponential"))
    load.add_argument("--ramp-up-start-rps", type=positive)
    load.add_argument("--ramp-up-end-rps", type=positive)
    load.add_argument("--num-warmups", type=natural, default=0, help="requests before the run, not measured")
    load.add_argument("--seed", type=int, default=0)


def _dataset(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data set")
    data.add_argument("--dataset-name", choices=DATASET_NAMES, default="random")
    data.add_argument("--dataset-path", help="file of sharegpt (JSON) or custom (JSON lines)")
    data.add_argument("--input-len", type=count, help="as --random-input-len")
    data.add_argument("--output-len", type=count, help="of whatever data set")
    data.add_argument("--random-input-len", type=count, default=256)
    data.add_argument("--random-output-len", type=count, default=128)
    data.add_argument("--random-range-ratio", type=ratio, default=0.0, help="lengths vary by this share")
    data.add_argument("--random-prefix-len", type=natural, default=0, help="tokens that all prompts share")
    data.add_argument("--random-vocab-size", type=count, default=1000, help="random token ids are below this")
    data.add_argument("--prefix-repetition-prefix-len", type=count, default=256)
    data.add_argument("--prefix-repetition-suffix-len", type=count, default=256)
    data.add_argument("--prefix-repetition-num-prefixes", type=count, default=10)
    data.add_argument("--prefix-repetition-output-len", type=count, default=128)
    data.add_argument("--sharegpt-output-len", type=count, help="default: about the recorded answer's length")
    data.add_argument("--custom-output-len", type=count, default=256, help="of lines that name none")


def _report(parser: argparse.ArgumentParser) -> None:
    report = parser.add_argument_group("report")
    report.add_argument("--goodput", nargs="+", type=limit, metavar="METRIC:MS", help="such as ttft:200 tpot:50")
    report.add_argument(
        "--percentile-metrics", type=metrics, default=",".join(METRICS), help=f"also {', '.join(QUEUE_METRICS)}"
    )
    report.add_argument("--metric-percentiles", type=percentiles, default="99", help="such as 25,50,99")
    report.add_argument("--save-result", action="store_true", help="write the JSON report")
    report.add_argument("--save-detailed", action="store_true", help="with every request's own numbers")
    report.add_argument("--append-result", action="store_true", help="a further line of the file, if it is there")
    report.add_argument("--result-dir", default=".")
    report.add_argument("--result-filename")
    report.add_argument("--html-report", nargs="?", const="", metavar="FILE", help="one self-contained page of plots")
    report.add_argument("--metadata", nargs="*", type=pair, default=[], metavar="KEY=VALUE")
    report.add_argument("--label", help="first part of the result's file name")
    report.add_argument("--disable-tqdm", action="store_true")


def settle(args: argparse.Namespace) -> None:
    """Apply flags for all data sets, and defaults that depend on others, as vLLM does."""
    if args.input_len is not None:
        args.random_input_len = args.input_len
    if args.output_len is not None:
        args.random_output_len = args.prefix_repetition_output_len = args.output_len
        args.sharegpt_output_len = args.custom_output_len = args.output_len
    if args.ignore_eos is None:
        args.ignore_eos = args.dataset_name == "random"


def check(args: argparse.Namespace) -> str:
    """One line about flags that contradict each other, or an empty text."""
    ramp = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.num_prompts > MAX_PROMPTS:
        return f"--num-prompts is at most {MAX_PROMPTS}"
    if args.max_duration_sec > MAX_SECONDS:
        return f"--max-duration-sec is at most {MAX_SECONDS:g}"
    if args.ramp_up_strategy and None in ramp:
        return "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps"
    if not args.ramp_up_strategy and ramp != (None, None):
        return "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy"
    if args.ramp_up_strategy and not math.isinf(args.request_rate):
        return "give --request-rate or --ramp-up-strategy, not both"
    return ""


def limit(text: str) -> tuple[str, float]:
    metric, _, value = text.partition(":")
    if metric not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{metric} is none of ttft, tpot, e2el")
    return metric, positive(value)


def metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in (*METRICS, *QUEUE_METRICS)]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join((*METRICS, *QUEUE_METRICS))}")
    return names


def percentiles(text: str) -> tuple[float, ...]:
    values = tuple(float(value) for value in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text} is not within 0 and 100")
    return values
