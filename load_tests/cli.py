"""`troupellm bench`: load tests and benchmarks. Light to import: a benchmark is loaded only when it runs."""

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module

from troupellm.load_tests.flags import engine, kv_cache, operations, serve, servers

BENCHMARKS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "serve": (serve.serve, "open-loop load on a running server"),
    "throughput": (engine.throughput, "offline, beside transformers"),
    "offline": (engine.offline, "tokens/s beside OpenVINO, vLLM, llama.cpp"),
    "gguf": (engine.gguf, "tokens/s of GGUF files, beside llama.cpp"),
    "quality": (engine.quality, "what fewer bits cost: perplexity beside bytes"),
    "kernels": (operations.kernels, "every operation beside its limits"),
    "step": (operations.step, "one decoding step beside its roofline"),
    "embed": (engine.embed, "vectors, beside sentence-transformers' batching"),
    "chain": (engine.chain, "the actor chain with an instant worker"),
    "lora": (operations.lora, "what adapters cost in decode steps"),
    "overlap": (operations.overlap, "steps on a device, and the host beside it"),
    "scheduler": (engine.scheduler, "one step, and one admission"),
    "eviction": (kv_cache.eviction, "hit rates of lru and arc beside the optimum"),
    "leases": (kv_cache.leases, "what KV leases keep for agents"),
    "soak": (servers.soak, "mixed traffic and faults; leaks and memory slope"),
    "prefill": (engine.prefill, "prompts that come together"),
    "forks": (engine.forks, "forks and beams beside independent requests"),
    "offload": (kv_cache.offload, "what KV offload gives, and what it costs"),
    "overload": (servers.overload, "five times what fits, and a flood"),
    "guide": (engine.guide, "what structured outputs cost"),
    "speculation": (engine.speculation, "what drafts bring"),
    "sse": (servers.sse, "what sending events costs, beside a bare app"),
    "start": (servers.start, "from starting a server to its first token"),
    "recovery": (servers.recovery, "a worker killed under its streams"),
    "handover": (kv_cache.handover, "prefill here, decode there"),
    "hostile": (servers.hostile, "one key floods; how long others wait"),
    "input": (servers.long_bodies, "long bodies beside a stream and probes"),
    "heartbeat": (engine.heartbeat, "loop lag of an embedding host"),
}


class _Formatter(argparse.HelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", [], {}, argparse.SUPPRESS) or action.help is None:
            return action.help
        return f"{action.help} (default: %(default)s)"


def command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench` and its benchmarks; each sets `func`, which takes the namespace and returns an exit code."""
    parser = subparsers.add_parser("bench", help="load tests and benchmarks", allow_abbrev=False)
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name, (add_flags, summary) in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(
            name, help=summary, description=summary, formatter_class=_Formatter, allow_abbrev=False
        )
        add_flags(benchmark)
        benchmark.set_defaults(func=_run, module=f"troupellm.load_tests.bench.{name}")


def _run(args: argparse.Namespace) -> int:
    """2 for a result that could not be written: that is seen before minutes of measuring, not after them."""
    result = getattr(args, "result_json", None)
    if result and (os.path.isdir(result) or not os.path.isdir(os.path.dirname(result) or ".")):
        print(f"troupellm bench: --result-json {result}: no such folder, or a folder itself", file=sys.stderr)
        return 2
    return int(import_module(args.module).run(args))
