"""Goals of whole models: the worker's step, the engine, HTTP, and `transformers` beside them."""

import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import torch

from troupellm.load_tests.gpu.gathered import Found, Gathered
from troupellm.load_tests.gpu.models import config_of, write_model
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
from troupellm.load_tests.step.profile import Parts, parts_of
from troupellm.protocol.config import EngineConfig

T = TypeVar("T")
CONTEXT, STEPS, STEP_TOKENS = 1024, 64, 8192
SMALL, LARGE, SPARSE = "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"
SHORT = {SMALL: "0.6b", LARGE: "8b"}


class WorkerStep(msgspec.Struct, frozen=True):
    """Of a worker that does nothing but decode."""

    seconds: float
    parts: Parts
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
        self._engine_seconds: dict[tuple[str, int, str], float] = {}
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
        """Of models in bfloat16 whose layers are computed in `block`."""
        return self._ceilings.roof("bfloat16", block)

    def serving(self, name: str, batch: int, length: int, **more: Any) -> dict[str, Any]:
        """What an engine is told that serves a model to up to `batch` sequences of `length` tokens."""
        return {"model": str(write_model(name, self._folder)), **self._settings(batch, length, **more)}

    def run(self, measure: Callable[[], Awaitable[T]], seconds: float) -> T:
        """What a measure gives that awaits engines; the device's memory is free again afterwards.

        Raises:
            TimeoutError: it took longer than so many seconds.
        """

        async def bounded() -> T:
            with anyio.fail_after(seconds):
                return await measure()

        try:
            return anyio.run(bounded)
        finally:
            self._free()

    @contextmanager
    def worker(self, name: str, batch: int, length: int, **more: Any) -> Iterator[BareWorker]:
        """A worker without an engine around it; the device's memory is free again afterwards."""
        config = EngineConfig.from_flat(self.serving(name, batch, length, **more))
        worker = BareWorker(write_model(name, self._folder), config)
        try:
            yield worker
        finally:
            worker.close()
            del worker
            self._free()

    def _settings(self, batch: int, length: int, **more: Any) -> dict[str, Any]:
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
        """The worker's own step, and what it is made of."""
        key = (name, batch)
        if not more and context == CONTEXT and key in self._worker_steps:
            return self._worker_steps[key]
        self._free()
        model, length = write_model(name, self._folder), context + 2 * STEPS + 32
        config = {"model": str(model), **self._settings(batch, length, **more)}
        worker = BareWorker(model, EngineConfig.from_flat(config))
        try:
            worker.fill(batch, context, 2 * STEPS)
            seconds = worker.step_seconds(STEPS)
            graph = worker.graph_seconds(STEPS)
            found = WorkerStep(seconds, parts_of(worker.decode, self._device), graph)
        finally:
            worker.close()
        if not more and context == CONTEXT:
            self._worker_steps[key] = found
        return found

    def engine_step(self, name: str, batch: int, quantization: str = "") -> float:
        """Seconds of a step through the engine, sampling and detokenizing included."""
        key = (name, batch, quantization)
        if key not in self._engine_seconds:
            self._free()
            tokens = tokens_of_each(batch, CONTEXT, STEPS, STEP_TOKENS)
            more = {"quantization": quantization} if quantization else {}
            settings = self._settings(batch, CONTEXT + tokens + 8, **more)
            prompts = prompts_of(batch, CONTEXT, SIZES[name].vocab)
            model = write_model(name, self._folder)
            self._engine_seconds[key] = through_engine(
                model, settings, prompts, tokens, steps=STEPS, warm_up=WARM_UP_TOKENS
            )
        return self._engine_seconds[key]

    def _free(self) -> None:
        """What the one before has left, also where it failed and its error held on to it."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _roofline(self, name: str, batch: int, quantization: str = "", *, meanwhile: float = 0.0) -> float:
        """meanwhile: tokens that sequences have written on average when the clock starts."""
        precision = FP8_WEIGHTS if quantization == "fp8" else BF16
        roof = self._ceilings.roof("bfloat16", quantization or None)
        return decode_seconds(SIZES[name], precision, roof, batch=batch, context=CONTEXT + meanwhile + STEPS / 2)

    def decode(self, name: str, batches: tuple[int, ...], quantization: str = "") -> Found:
        """G1, G2, G3, G4."""
        gathered = Gathered()
        for batch in batches:
            with gathered.part(part := f"batch {batch}"):
                seconds = self.engine_step(name, batch, quantization)
                # Who began first has written meanwhile, and has more keys than who began last.
                meanwhile = prefill_steps(batch, CONTEXT, STEP_TOKENS) / 2
                roof = self._roofline(name, batch, quantization, meanwhile=meanwhile)
                gathered.found[part] = roof_frac(roof, seconds)
                gathered.details[part] = {"ms": seconds * 1e3, "roofline ms": roof * 1e3, "tokens/s": batch / seconds}
        return gathered.all()

    def tax(self) -> Found:
        """G5."""
        gathered = Gathered()
        for name, short in SHORT.items():
            with gathered.part(short):
                step, roof = self.worker_step(name, 1), self._roofline(name, 1)
                gathered.found[short] = kernel_tax_us(roof, step.bare, step.parts.kernels)
                gathered.details[short] = {
                    "kernels": step.parts.kernels, "ms": step.bare * 1e3, "worker ms": step.seconds * 1e3,
                    "roofline ms": roof * 1e3,
                }  # fmt: skip
        return gathered.all()

    def above_the_worker(self) -> Found:
        """G13."""
        gathered = Gathered()
        for name, short in SHORT.items():
            with gathered.part(short):
                step, engine = self.worker_step(name, 1), self.engine_step(name, 1)
                gathered.found[f"{short} batch 1"] = engine / step.bare
                gathered.details[short] = {
                    "ms": step.bare * 1e3, "worker ms": step.seconds * 1e3, "engine ms": engine * 1e3,
                }  # fmt: skip
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
        self._free()
        model, tokens = write_model(name, self._folder), tokens_of_each(batch, CONTEXT, STEPS, STEP_TOKENS)
        settings = self._settings(batch, CONTEXT + tokens + 8)
        plan = plan_server(
            "troupellm", model=model, peers=self._folder, link=link_package(self._folder / "import"), threads=4,
            sequences=batch, length=settings["max_model_len"],
        )  # fmt: skip
        flags = flags_of(settings, "dtype", "device", "load_format", "block_size", *filling(0))
        flags += ["--max-num-queued-reqs", str(batch), "--cudagraph-capture-sizes", str(batch)]
        plan.command.extend(flags)
        prompts = prompts_of(batch, CONTEXT, SIZES[name].vocab)
        return through_http(plan, self._folder / "server.log", prompts, tokens, warm_up=WARM_UP_TOKENS)

    def prompts(self) -> Found:
        """G11: arithmetic of one prompt over the ceiling, from its arrival to its first token."""
        from troupellm import LLM, SamplingParams

        found, details = dict[str, float](), dict[str, Any]()
        self._free()
        llm = LLM(str(write_model(LARGE, self._folder)), **self._settings(1, 8192 + 64))
        try:
            for name, tokens in (("2k", 2048), ("8k", 8192)):
                times = []
                for number in range(4):
                    prompt = prompts_of(number + 2, tokens, SIZES[LARGE].vocab)[0]
                    begin = time.perf_counter()
                    llm.generate(
                        [{"prompt_token_ids": prompt}],
                        SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False,
                    )  # fmt: skip
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

    def cache_share(self) -> Found:
        """G25: what the engine took by itself of the memory that the weights leave."""
        model = write_model(LARGE, self._folder)
        settings = self._settings(64, 4096)
        del settings["num_gpu_blocks_override"]
        self._free()
        worker = BareWorker(model, EngineConfig.from_flat({"model": str(model), **settings}))
        try:
            ready = worker.ready
            held = ready.num_blocks * ready.block_size * SIZES[LARGE].kv_numbers * 2
            total = torch.cuda.mem_get_info(self._device)[1]
            free = total - ready.weight_bytes
        finally:
            worker.close()
        return {"share": held / free}, {"cache GiB": held / 2**30, "free GiB": free / 2**30}

    def beside_transformers(self) -> Found:
        """G16: the same shapes by `transformers`, in this process and on this device."""
        gathered = Gathered()
        for name, short in SHORT.items():
            with gathered.part(short):
                self._free()
                theirs, batch32 = _transformers(name, self._device, with_batch=name == LARGE)
                ours = 1 / self.engine_step(name, 1)
                gathered.found[f"{short} generate"] = ours / theirs
                gathered.details[short] = {"transformers tokens/s": theirs, "engine tokens/s": ours}
                if isinstance(batch32, float):
                    rate = 32 / self.engine_step(name, 32)
                    gathered.found[f"{short} generate_batch 32"] = rate / batch32
                    gathered.details[f"{short} batch 32"] = {"transformers tokens/s": batch32, "engine tokens/s": rate}
                elif batch32:
                    gathered.details[f"{short} batch 32"] = batch32
        return gathered.all()


def _transformers(name: str, device: torch.device, *, with_batch: bool) -> tuple[float, float | str]:
    """Decoding tokens/s of `generate` for one sequence, and of `generate_batch` for 32 or why there is none."""
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils import logging

    logging.set_verbosity_error()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**config_of(name)), dtype=torch.bfloat16).eval()
    prompts = prompts_of(32, CONTEXT, SIZES[name].vocab)
    ids = torch.tensor(prompts[:1], device=device)

    def seconds(tokens: int) -> float:
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    with torch.inference_mode():
        seconds(4)
        one = STEPS / max(seconds(STEPS + 1) - seconds(1), 1e-9)
        if not with_batch:
            return one, ""
        try:
            return one, _generate_batch(model, prompts)
        except Exception as error:  # its interface moves from version to version, and its cache may not fit
            return one, f"{type(error).__name__}: {error}"[:300]


def _generate_batch(model: Any, prompts: list[list[int]]) -> float:
    """Tokens per second of the whole call, prompts included."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(inputs=prompts[:2], generation_config=config)
    begin = time.perf_counter()
    results = model.generate_batch(inputs=prompts, generation_config=config)
    seconds = time.perf_counter() - begin
    return sum(len(result.generated_tokens) for result in results.values()) / seconds
