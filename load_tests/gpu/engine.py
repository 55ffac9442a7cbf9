"""Goals of whole models: the worker's step, the engine, and HTTP."""

import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import anyio
import msgspec
import torch

from troupellm.load_tests.gpu.gathered import Found, Gathered
from troupellm.load_tests.gpu.models import write_model
from troupellm.load_tests.kernels.ceilings import Measured
from troupellm.load_tests.peers.environments import link_package
from troupellm.load_tests.peers.servers import plan_server
from troupellm.load_tests.roofline import (
    BF16,
    FP8_WEIGHTS,
    SIZES,
    Ceilings,
    decode_seconds,
    kernel_tax_us,
    prefill_seconds,
    roof_frac,
)
from troupellm.load_tests.step.above import (
    WARM_UP_TOKENS,
    filling,
    flags_of,
    prefill_steps,
    prompts_of,
    through_engine,
    through_http,
    tokens_of_each,
)
from troupellm.load_tests.step.bare import BLOCK_SIZE, BareWorker
from troupellm.load_tests.step.profile import PROFILED_STEPS, parts_of
from troupellm.protocol.config.engine import EngineConfig

T = TypeVar("T")
CONTEXT, STEPS, STEP_TOKENS = 1024, 64, 8192
SMALL, LARGE, SPARSE = "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"
SHORT = {SMALL: "0.6b", LARGE: "8b"}
ABOVE = {LARGE: (1, 32, 256), SMALL: (1,)}
"""Batches at which an engine is compared with its worker's graph."""
ROUNDS, ROUND_SECONDS = 3, 5.0
"""Of an engine's steps; those of many rows, whose prompts take longer than that, are measured once."""
ENGINE_SECONDS = 90.0
"""An engine is given up that takes longer, its start and its prompts included."""


class WorkerStep(msgspec.Struct, frozen=True):
    """Of a worker that does nothing but decode."""

    seconds: float
    graph: float | None
    """Seconds of the step's graph alone; None where it has none."""

    @property
    def bare(self) -> float:
        """The least of it that can be timed."""
        return self.seconds if self.graph is None else self.graph


class Models:
    """Measures models on a device; engines and workers live for one measurement each, times are kept."""

    def __init__(self, device: torch.device, ceilings: Measured, folder: Path) -> None:
        self._device, self._ceilings, self._folder = device, ceilings, folder
        self._engine_seconds: dict[tuple[str, int, str], list[float]] = {}
        self._worker_steps: dict[tuple[str, int], WorkerStep] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def folder(self) -> Path:
        """For files that a measure needs."""
        return self._folder

    @property
    def ceilings(self) -> Measured:
        return self._ceilings

    def roof(self, block: str | None = None) -> Ceilings:
        """Of models in bfloat16 whose layers are computed in `block`.

        Raises:
            RuntimeError: products in that type were not measured; a wider one's ceiling would make goals easier.
        """
        if block == "fp8" and not self._ceilings.gemm_fp8:
            raise RuntimeError("the ceiling of products in fp8 was not measured")
        return self._ceilings.roof("bfloat16", block)

    def serving(self, name: str, batch: int, length: int, **more: Any) -> dict[str, Any]:
        """The settings of an engine that serves a model to up to `batch` sequences of `length` tokens."""
        return {"model": str(write_model(name, self._folder)), **self.settings_of(batch, length, **more)}

    def run(self, measure: Callable[[], Awaitable[T]], seconds: float) -> T:
        """The result of a measure that awaits engines; the device's memory is free again afterwards.

        Raises:
            TimeoutError: it took longer than so many seconds.
        """

        async def bounded() -> T:
            with anyio.fail_after(seconds):
                return await measure()

        try:
            return anyio.run(bounded)
        finally:
            self.free()

    @contextmanager
    def worker(self, name: str, batch: int, length: int, **more: Any) -> Iterator[BareWorker]:
        """A worker without an engine around it; the device's memory is free again afterwards."""
        self.free()  # of a worker before, whose user held on to it
        config = EngineConfig.from_flat(self.serving(name, batch, length, **more))
        worker = BareWorker(write_model(name, self._folder), config)
        try:
            yield worker
        finally:
            worker.close()
            del worker
            self.free()

    def settings_of(self, batch: int, length: int, **more: Any) -> dict[str, Any]:
        return {
            "dtype": "bfloat16",
            "device": self._device.type,
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": batch,
            **filling(STEP_TOKENS),
            "max_model_len": length,
            "num_gpu_blocks_override": batch * (-(-length // BLOCK_SIZE) + 1),
            # The one that is measured: graphs of other sizes would be captured meanwhile.
            **({"cudagraph_capture_sizes": (batch,)} if self._device.type == "cuda" else {}),
            **more,
        }

    def worker_step(self, name: str, batch: int, context: int = CONTEXT, **more: Any) -> WorkerStep:
        """The worker's own step."""
        key = (name, batch)
        if not more and context == CONTEXT and key in self._worker_steps:
            return self._worker_steps[key]
        with self.worker(name, batch, context + STEPS + 32, **more) as worker:
            worker.capture_graphs()
            worker.fill(batch, context, STEPS + 2)
            found = WorkerStep(worker.step_seconds(STEPS), worker.graph_seconds(STEPS))
        if not more and context == CONTEXT:
            self._worker_steps[key] = found
        return found

    def kernels(self, name: str, batch: int) -> int:
        """Number of kernels that a step launches, from a profile. Later launches in the same process may be slower."""
        steps = 2 * PROFILED_STEPS
        with self.worker(name, batch, CONTEXT + steps + 32) as worker:
            worker.capture_graphs()
            worker.fill(batch, CONTEXT, steps)
            worker.step_seconds(4)
            return parts_of(worker.decode, self._device).kernels

    def engine_step(self, name: str, batch: int, quantization: str = "") -> float:
        """Seconds of a step through the engine, sampling and detokenizing included; the median of its rounds."""
        return median(self._engine_rounds(name, batch, quantization))

    def engine_details(self, name: str, batch: int, quantization: str = "") -> dict[str, Any]:
        """Of the same."""
        rounds = self._engine_rounds(name, batch, quantization)
        return {"engine ms": median(rounds) * 1e3, "runs": len(rounds), "engine ms of each": [s * 1e3 for s in rounds]}

    def _engine_rounds(self, name: str, batch: int, quantization: str) -> list[float]:
        key = (name, batch, quantization)
        if key not in self._engine_seconds:
            self.free()
            tokens = tokens_of_each(batch, CONTEXT, STEPS, STEP_TOKENS)
            more = {"quantization": quantization} if quantization else {}
            settings = self.settings_of(batch, CONTEXT + tokens + 8, **more)
            prompts = prompts_of(batch, CONTEXT, SIZES[name].vocab)
            model = write_model(name, self._folder)
            self._engine_seconds[key] = through_engine(
                model,
                settings,
                prompts,
                tokens,
                steps=STEPS,
                warm_up=WARM_UP_TOKENS,
                rounds=ROUNDS,
                round_seconds=ROUND_SECONDS,
                limit=ENGINE_SECONDS,
            )
        return self._engine_seconds[key]

    def free(self) -> None:
        """Free the memory of the measure before, also if it failed and its error held references."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _roofline(self, name: str, batch: int, quantization: str = "", *, meanwhile: float = 0.0) -> float:
        """meanwhile: tokens that sequences have written on average when the clock starts."""
        precision = FP8_WEIGHTS if quantization == "fp8" else BF16
        roof = self.roof(quantization or None)
        return decode_seconds(SIZES[name], precision, roof, batch=batch, context=CONTEXT + meanwhile + STEPS / 2)

    def decode(self, name: str, batches: tuple[int, ...], quantization: str = "") -> Found:
        """G1, G2, G3, G4."""
        gathered = Gathered()
        for batch in batches:
            with gathered.part(part := f"batch {batch}"):
                seconds = self.engine_step(name, batch, quantization)
                # The first sequences generate while the last prompts are computed, so they have more keys.
                meanwhile = prefill_steps(batch, CONTEXT, STEP_TOKENS) / 2
                roof = self._roofline(name, batch, quantization, meanwhile=meanwhile)
                gathered.found[part] = roof_frac(roof, seconds)
                gathered.details[part] = {
                    **self.engine_details(name, batch, quantization),
                    "roofline ms": roof * 1e3,
                    "tokens/s": batch / seconds,
                }
        return gathered.all()

    def tax(self, kernels: Mapping[str, int]) -> Found:
        """G5.

        Args:
            kernels: of each model's step, counted by another process: a profile would slow this one down.
        """
        gathered = Gathered()
        for name, short in SHORT.items():
            with gathered.part(short):
                step, roof = self.worker_step(name, 1), self._roofline(name, 1)
                gathered.details[short] = {
                    "ms": step.bare * 1e3,
                    "worker ms": step.seconds * 1e3,
                    "roofline ms": roof * 1e3,
                    "steps": STEPS,
                }
                if name not in kernels:
                    raise RuntimeError("its kernels were not counted")
                gathered.found[short] = kernel_tax_us(roof, step.bare, kernels[name])
                gathered.details[short]["kernels"] = kernels[name]
        return gathered.all()

    def above_the_worker(self) -> Found:
        """G13."""
        gathered = Gathered()
        for name, batches in ABOVE.items():
            for batch in batches:
                with gathered.part(part := f"{SHORT[name]} batch {batch}"):
                    step, engine = self.worker_step(name, batch), self.engine_step(name, batch)
                    gathered.found[part] = engine / step.bare
                    gathered.details[part] = {
                        "ms": step.bare * 1e3,
                        "worker ms": step.seconds * 1e3,
                        **self.engine_details(name, batch),
                    }
        return gathered.all()

    def http(self) -> Found:
        """G14."""
        gathered = Gathered()
        for name, batch in ((LARGE, 64), (SMALL, 256)):
            with gathered.part(f"{SHORT[name]} batch {batch}"):
                http, engine = self._http_step(name, batch), self.engine_step(name, batch)
                gathered.found[f"{SHORT[name]} batch {batch}"] = engine / http
                gathered.details[SHORT[name]] = {"http ms": http * 1e3, "engine ms": engine * 1e3}
        return gathered.all()

    def _http_step(self, name: str, batch: int) -> float:
        """As `engine_step`, through a server."""
        self.free()
        model, tokens = write_model(name, self._folder), tokens_of_each(batch, CONTEXT, STEPS, STEP_TOKENS)
        settings = self.settings_of(batch, CONTEXT + tokens + 8)
        plan = plan_server(
            "troupellm",
            model=model,
            peers=self._folder,
            link=link_package(self._folder / "import"),
            threads=4,
            sequences=batch,
            length=settings["max_model_len"],
        )
        flags = flags_of(settings, "dtype", "device", "load_format", "block_size", *filling(0))
        flags += ["--max-num-queued-reqs", str(batch), "--cudagraph-capture-sizes", str(batch)]
        plan.command.extend(flags)
        prompts = prompts_of(batch, CONTEXT, SIZES[name].vocab)
        return through_http(plan, self._folder / "server.log", prompts, tokens, warm_up=WARM_UP_TOKENS)

    def prompts(self) -> Found:
        """G11: arithmetic of one prompt over the ceiling, from its arrival to its first token."""
        from troupellm import LLM, SamplingParams

        found, details = dict[str, float](), dict[str, Any]()
        self.free()
        llm = LLM(str(write_model(LARGE, self._folder)), **self.settings_of(1, 8192 + 64))
        try:
            for name, tokens in (("2k", 2048), ("8k", 8192)):
                times = []
                for number in range(4):
                    prompt = prompts_of(number + 2, tokens, SIZES[LARGE].vocab)[0]
                    begin = time.perf_counter()
                    llm.generate(
                        [{"prompt_token_ids": prompt}],
                        SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
                        use_tqdm=False,
                    )
                    times.append(time.perf_counter() - begin)
                least = prefill_seconds(SIZES[LARGE], BF16, self._ceilings.roof("bfloat16"), tokens=tokens)
                found[name], details[name] = least / sorted(times[1:])[1], {"ms": sorted(times[1:])[1] * 1e3}
        finally:
            llm.close()
        return found, details

    def invariant(self) -> Found:
        """G22."""
        normal = self.worker_step(LARGE, 32).seconds
        same = self.worker_step(LARGE, 32, batch_invariant=True).seconds
        return {"ratio": same / normal}, {"normal ms": normal * 1e3, "invariant ms": same * 1e3}

    def small_cache(self) -> Found:
        """G23."""
        plain = self.worker_step(LARGE, 32, 8192).seconds
        small = self.worker_step(LARGE, 32, 8192, kv_cache_dtype="fp8").seconds
        return {"ratio": small / plain}, {"bf16 ms": plain * 1e3, "fp8 ms": small * 1e3}
