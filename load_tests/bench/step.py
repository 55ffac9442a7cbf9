"""`bench step`: one decoding step by the worker alone, through the engine and through HTTP, beside its roofline."""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from troupellm.load_tests.kernels.ceilings import Measured, ceiling_text, measure_ceilings
from troupellm.load_tests.peers.environments import link_package
from troupellm.load_tests.peers.process import unwinding
from troupellm.load_tests.peers.servers import ServerPlan, plan_server
from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.roofline import ModelSize, Precision, decode_seconds, kernel_tax_us, roof_frac
from troupellm.load_tests.step import beside
from troupellm.load_tests.step.above import (
    WARM_UP_TOKENS,
    filling,
    flags_of,
    prompts_of,
    through_engine,
    through_http,
    tokens_of_each,
)
from troupellm.load_tests.step.bare import BLOCK_SIZE, BareWorker
from troupellm.load_tests.step.profile import PROFILED_STEPS, Parts, parts_of
from troupellm.protocol.config.engine import EngineConfig

STEP_TOKENS = 2048
"""That steps have room for while prompts are computed, and as many more as sequences write."""
WEIGHT_BYTES = {"int8": 1.0, "int8-weight-only": 1.0, "fp8": 1.0, "int4": 0.5 + 2 / 128}


class Row(msgspec.Struct, frozen=True):
    """One batch size. Seconds per step, by level; `roofline` is the least that the ceilings of this run allow."""

    batch: int
    roofline: float
    seconds: dict[str, float]
    parts: Parts | None
    graph: float | None = None
    """Seconds of the worker's CUDA graph alone."""

    def report(self) -> dict[str, Any]:
        """Derived numbers."""
        first = self.graph or next(iter(self.seconds.values()))
        tax = kernel_tax_us(self.roofline, first, self.parts.kernels) if self.parts and self.parts.kernels else None
        return {
            **msgspec.to_builtins(self),
            "roof_frac": {level: roof_frac(self.roofline, seconds) for level, seconds in self.seconds.items()},
            "kernel_tax_us": tax,
            "tokens_per_s": {level: self.batch / seconds for level, seconds in self.seconds.items()},
        }


def run(args: argparse.Namespace) -> int:
    if args.beside is not None:
        return beside.run(
            args.model,
            args.beside,
            args.batches,
            steps=args.steps,
            repeats=args.repeats,
            batch_invariant=args.batch_invariant,
            result=args.result_json,
        )
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench step: there is no CUDA device; --device cpu", file=sys.stderr)
        return 2
    threads = args.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with unwinding(), ExitStack() as stack:  # its server is in a session of its own and would stay
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="troupe-step-")))
        bench = StepBench(args, device, threads, work)
        print(ceiling_text(bench.ceilings), flush=True)
        print(f"\n{heading(args.levels)}")
        for batch in args.batches:
            bench.rows.append(bench.measure(batch))
            print(line(bench.rows[-1], args.levels), flush=True)
            if args.result_json:
                content = {
                    **{name: getattr(args, name) for name in ("model", "device", "quantization", "context", "steps")},
                    "dtype": bench.dtype,
                    "num_threads": threads,
                    "ceilings": msgspec.to_builtins(bench.ceilings),
                    "rows": [row.report() for row in bench.rows],
                }
                Path(args.result_json).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


class StepBench:
    def __init__(self, args: argparse.Namespace, device: torch.device, threads: int, work: Path) -> None:
        self.args, self.device, self.threads, self._work = args, device, threads, work
        self.dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        named = args.model in SHAPES
        self._model = write_random_model(work / "model", SHAPES[args.model]) if named else Path(args.model).absolute()
        config = json.loads((self._model / "config.json").read_text(encoding="utf-8"))
        self._size = ModelSize.of(config)
        self._vocab = self._size.vocab
        self.ceilings: Measured = measure_ceilings(device, args.seconds)
        self.rows: list[Row] = []

    def measure(self, batch: int) -> Row:
        seconds, parts, graph = dict[str, float](), None, None
        if "worker" in self.args.levels:
            seconds["worker"], parts, graph = self._bare(batch)
        prompts = prompts_of(batch, self.args.context, self._vocab)
        tokens = tokens_of_each(batch, self.args.context, self.args.steps, STEP_TOKENS + batch)
        warm_up = WARM_UP_TOKENS if self.device.type == "cuda" else 0
        if "engine" in self.args.levels:
            settings, steps = self.settings_of(batch, tokens), self.args.steps
            (seconds["engine"],) = through_engine(self._model, settings, prompts, tokens, steps=steps, warm_up=warm_up)
        if "http" in self.args.levels:
            log = self._work / "server.log"
            seconds["http"] = through_http(self._server(batch, tokens), log, prompts, tokens, warm_up=warm_up)
        return Row(batch, self.roofline(batch), seconds, parts, graph)

    def roofline(self, batch: int) -> float:
        width = 4.0 if self.dtype == "float32" else 2.0
        block = WEIGHT_BYTES.get(self.args.quantization or "", width)
        quantized = self.args.quantization in ("int8", "fp8")
        precision = Precision(block=block, head=block if self.device.type == "cpu" else width, kv=width)
        roof = self.ceilings.roof(self.dtype, self.args.quantization if quantized else None)
        context = self.args.context + self.args.steps / 2
        return decode_seconds(self._size, precision, roof, batch=batch, context=context)

    def settings_of(self, batch: int, tokens: int) -> dict[str, Any]:
        """For sequences that write so many tokens."""
        length = self.args.context + tokens + 8
        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device.type,
            "enable_prefix_caching": False,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": batch,
            **filling(STEP_TOKENS + batch),
            "max_model_len": length,
            "num_gpu_blocks_override": batch * (-(-length // BLOCK_SIZE) + 1),
            "load_format": self.args.load_format,
        }
        if self.device.type == "cpu":
            settings["num_threads"] = self.threads
        else:  # the one that is measured: graphs of other sizes would be captured meanwhile
            settings["cudagraph_capture_sizes"] = (batch,)
        if self.args.quantization:
            settings["quantization"] = self.args.quantization
        return settings

    def _bare(self, batch: int) -> tuple[float, Parts, float | None]:
        steps = self.args.steps + PROFILED_STEPS + 8
        settings = self.settings_of(batch, steps)
        worker = BareWorker(self._model, EngineConfig.from_flat({"model": str(self._model), **settings}))
        try:
            worker.fill(batch, self.args.context, steps)
            seconds, graph = worker.step_seconds(self.args.steps), worker.graph_seconds(self.args.steps)
            return seconds, parts_of(worker.decode, self.device), graph
        finally:
            worker.close()

    def _server(self, batch: int, tokens: int) -> ServerPlan:
        """The server with the engine's settings."""
        settings = self.settings_of(batch, tokens)
        plan = plan_server(
            "troupellm",
            model=self._model,
            peers=self._work,
            link=link_package(self._work / "import"),
            threads=self.threads,
            sequences=batch,
            length=settings["max_model_len"],
        )
        extra = ["--device", self.device.type, "--load-format", self.args.load_format]
        extra += ["--dtype", self.dtype, "--max-num-queued-reqs", str(batch)]
        extra += flags_of(settings, "block_size", *filling(0))
        if self.device.type == "cuda":
            extra += ["--cudagraph-capture-sizes", str(batch)]
        if self.args.quantization:
            extra += ["--quantization", self.args.quantization]
        return msgspec.structs.replace(plan, command=[*plan.command, *extra])


def heading(levels: list[str]) -> str:
    columns = "".join(f"{level + ' ms':>12}{'of roof':>9}{'tokens/s':>10}" for level in levels)
    return f"{'batch':<7}{'roof ms':>9}{columns}{'kernels':>9}{'graph ms':>10}{'tax us':>8}{'outside':>9}{'us':>8}"


def line(row: Row, levels: list[str]) -> str:
    columns = "".join(
        f"{row.seconds[level] * 1e3:>12.3f}{row.roofline / row.seconds[level]:>9.2f}"
        f"{row.batch / row.seconds[level]:>10.0f}"
        for level in levels
    )
    end = ""
    if row.parts is not None:
        tax = row.report()["kernel_tax_us"]
        spelt = "-" if tax is None else f"{tax:.2f}"
        graph = "-" if row.graph is None else f"{row.graph * 1e3:.3f}"
        end = f"{row.parts.kernels:>9}{graph:>10}{spelt:>8}{row.parts.outside:>9.1%}{row.parts.outside_us:>8.0f}"
    return f"{row.batch:<7}{row.roofline * 1e3:>9.3f}{columns}{end}"
