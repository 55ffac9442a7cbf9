"""`troupellm bench`: load tests and benchmarks. Light to import: a benchmark is loaded only when it runs."""

import argparse
import os
import sys
from importlib import import_module

from troupellm.load_tests.chain import flags as chain
from troupellm.load_tests.embed import flags as embed
from troupellm.load_tests.eviction import flags as eviction
from troupellm.load_tests.forks import flags as forks
from troupellm.load_tests.gguf_files import flags as gguf_files
from troupellm.load_tests.guide import flags as guide
from troupellm.load_tests.handover import flags as handover
from troupellm.load_tests.heartbeat import flags as heartbeat
from troupellm.load_tests.hostile import flags as hostile
from troupellm.load_tests.input import flags as input_flags
from troupellm.load_tests.kernels import flags as kernels
from troupellm.load_tests.leases import flags as leases
from troupellm.load_tests.offline import flags as offline
from troupellm.load_tests.offload import flags as offload
from troupellm.load_tests.overlap import flags as overlap
from troupellm.load_tests.overload import flags as overload
from troupellm.load_tests.prefill import flags as prefill
from troupellm.load_tests.recovery import flags as recovery
from troupellm.load_tests.scheduler import flags as scheduler
from troupellm.load_tests.serve import flags as serve
from troupellm.load_tests.soak import flags as soak
from troupellm.load_tests.speculation import flags as speculation
from troupellm.load_tests.sse import flags as sse
from troupellm.load_tests.start import flags as start
from troupellm.load_tests.step import flags as step
from troupellm.load_tests.throughput import flags as throughput

BENCHMARKS = {
    "serve": (serve.add_flags, "troupellm.load_tests.serve.command", "open-loop load on a running server"),
    "throughput": (throughput.add_flags, "troupellm.load_tests.throughput.command", "offline, beside transformers"),
    "offline": (offline.add_flags, "troupellm.load_tests.offline.command", "tokens/s beside OpenVINO, vLLM, llama.cpp"),
    "gguf": (
        gguf_files.add_flags,
        "troupellm.load_tests.gguf_files.command",
        "tokens/s of GGUF files, beside llama.cpp",
    ),
    "kernels": (
        kernels.add_flags,
        "troupellm.load_tests.kernels.command",
        "every operation beside its limits",
    ),
    "step": (step.add_flags, "troupellm.load_tests.step.command", "one decoding step beside its roofline"),
    "embed": (embed.add_flags, "troupellm.load_tests.embed.command", "vectors, beside sentence-transformers' batching"),
    "chain": (chain.add_flags, "troupellm.load_tests.chain.command", "the actor chain with an instant worker"),
    "overlap": (overlap.add_flags, "troupellm.load_tests.overlap.command", "steps on a device, and the host beside it"),
    "scheduler": (scheduler.add_flags, "troupellm.load_tests.scheduler.command", "one step, and one admission"),
    "eviction": (
        eviction.add_flags,
        "troupellm.load_tests.eviction.command",
        "hit rates of lru and arc beside the optimum",
    ),
    "leases": (leases.add_flags, "troupellm.load_tests.leases.command", "what KV leases keep for agents"),
    "soak": (soak.add_flags, "troupellm.load_tests.soak.command", "mixed traffic and faults; leaks and memory slope"),
    "prefill": (
        prefill.add_flags,
        "troupellm.load_tests.prefill.command",
        "prompts that come together",
    ),
    "forks": (forks.add_flags, "troupellm.load_tests.forks.command", "forks and beams beside independent requests"),
    "offload": (offload.add_flags, "troupellm.load_tests.offload.command", "what KV offload gives, and what it costs"),
    "overload": (overload.add_flags, "troupellm.load_tests.overload.command", "five times what fits, and a flood"),
    "guide": (guide.add_flags, "troupellm.load_tests.guide.command", "what structured outputs cost"),
    "speculation": (
        speculation.add_flags,
        "troupellm.load_tests.speculation.command",
        "what drafts bring",
    ),
    "sse": (sse.add_flags, "troupellm.load_tests.sse.command", "what sending events costs, beside a bare app"),
    "start": (start.add_flags, "troupellm.load_tests.start.command", "from starting a server to its first token"),
    "recovery": (recovery.add_flags, "troupellm.load_tests.recovery.command", "a worker killed under its streams"),
    "handover": (handover.add_flags, "troupellm.load_tests.handover.command", "prefill here, decode there"),
    "hostile": (hostile.add_flags, "troupellm.load_tests.hostile.command", "one key floods; how long others wait"),
    "input": (input_flags.add_flags, "troupellm.load_tests.input.command", "long bodies beside a stream and probes"),
    "heartbeat": (heartbeat.add_flags, "troupellm.load_tests.heartbeat.command", "loop lag of an embedding host"),
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
    for name, (add_flags, module, summary) in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(
            name, help=summary, description=summary, formatter_class=_Formatter, allow_abbrev=False
        )
        add_flags(benchmark)
        benchmark.set_defaults(func=_run, module=module)


def _run(args: argparse.Namespace) -> int:
    """2 for a result that could not be written: that is seen before minutes of measuring, not after them."""
    result = getattr(args, "result_json", None)
    if result and (os.path.isdir(result) or not os.path.isdir(os.path.dirname(result) or ".")):
        print(f"troupellm bench: --result-json {result}: no such folder, or a folder itself", file=sys.stderr)
        return 2
    return int(import_module(args.module).run(args))
