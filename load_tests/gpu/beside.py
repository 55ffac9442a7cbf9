"""`transformers` on the same shapes, on this device: what it decodes per second."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from troupellm.load_tests.gpu.engine import CONTEXT, LARGE, SHORT, STEPS, Models
from troupellm.load_tests.gpu.gathered import Found, Gathered
from troupellm.load_tests.gpu.models import config_of
from troupellm.load_tests.roofline import SIZES
from troupellm.load_tests.step.above import prompts_of

BATCH, ROUNDS = 32, 3
POLL_SECONDS, ROUND_SECONDS, STOP_SECONDS = 1.0, 20.0, 5.0
"""A manager that takes longer for a round is stuck, or no rival; its thread is waited for no longer than so."""
BATCHING: dict[str, dict[str, Any]] = {
    "async and graphs": {"use_async_batching": True, "use_cuda_graph": True},
    "its own choice": {},
}
"""Settings of its continuous batching. The better one counts: attention with a mask may lose by graphs."""


# Outside of inference mode, which its thread is not in: tensors of that mode would fail there.
@torch.inference_mode(mode=False)
@torch.no_grad()
def beside_transformers(models: Models) -> Found:
    """G16: an engine's tokens/s over those of `generate` for one sequence, and of `generate_batch` for 32."""
    gathered = Gathered()
    for name, short in SHORT.items():
        with gathered.part(part := f"{short} generate"):
            ours = 1 / models.engine_step(name, 1)
            with _loaded(models, name) as model:
                theirs = generated(model, prompts_of(BATCH, CONTEXT, SIZES[name].vocab)[0], STEPS)
            gathered.found[part] = ours / theirs
            gathered.details[part] = {
                "transformers tokens/s": theirs,
                "transformers runs": ROUNDS,
                "tokens/s": ours,
                **models.engine_details(name, 1),
            }
    with gathered.part(part := f"{SHORT[LARGE]} generate_batch {BATCH}"):
        ours = BATCH / models.engine_step(LARGE, BATCH)
        with _loaded(models, LARGE) as model:
            rates, used = _ways(models, model, prompts_of(BATCH, CONTEXT, SIZES[LARGE].vocab))
        gathered.details[part] = {
            "transformers tokens/s": rates,
            "transformers": used,
            "transformers runs": ROUNDS,
            "tokens/s": ours,
            **models.engine_details(LARGE, BATCH),
        }
        if not rates:
            raise RuntimeError(f"none of its ways gave what was asked for: {used}")
        gathered.found[part] = ours / max(rates.values())
    return gathered.all()


@contextmanager
def _loaded(models: Models, name: str) -> Iterator[Any]:
    """Made up on the device; its memory is free again afterwards."""
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils import logging

    logging.set_verbosity_error()
    models.free()
    with models.device:
        model = AutoModelForCausalLM.from_config(Qwen3Config(**config_of(name)), dtype=torch.bfloat16).eval()
    try:
        yield model
    finally:
        del model
        models.free()


def rate_of(seconds: Callable[[int], float], sequences: int, steps: int) -> float:
    """Tokens/s of decoding alone: what `steps` tokens take longer than one, the median of some rounds; the first call
    warms up."""
    seconds(steps + 1)
    spent = median(seconds(steps + 1) - seconds(1) for _ in range(ROUNDS))
    if spent <= 0:
        raise RuntimeError(f"{steps} tokens more took {spent:.3g} s more")
    return sequences * steps / spent


def generated(model: Any, prompt: Sequence[int], steps: int) -> float:
    """Tokens/s of `generate`."""
    ids = torch.tensor([prompt], device=model.device)

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        written = written.cpu()  # when all of it is there
        taken = time.perf_counter() - begin
        if written.shape[1] != len(prompt) + tokens:
            raise RuntimeError(f"{written.shape[1] - len(prompt)} tokens came of {tokens}")
        return taken

    return rate_of(seconds, 1, steps)


def _ways(models: Models, model: Any, prompts: list[list[int]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Tokens/s by what its batching was told, and what it did then, or why there is no number."""
    rates, used = dict[str, float](), dict[str, Any]()
    for told, settings in BATCHING.items():
        models.free()  # the cache of the one before
        try:
            rates[told], used[told] = batched(model, prompts, STEPS, settings)
        except Exception as error:  # its interface moves from version to version, and its cache may not fit
            used[told] = f"{type(error).__name__}: {error}"[:300]
    return rates, used


def batched(model: Any, prompts: list[list[int]], steps: int, settings: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Tokens/s of continuous batching, and how it works. One manager, which is what `generate_batch` makes and ends in
    each call, goes through all rounds; no round finds a prompt of the one before in its cache."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    writing = GenerationConfig(max_new_tokens=steps + 1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(allow_block_sharing=False, max_requests_per_batch=len(prompts), **settings)
    with model.continuous_batching_context_manager(
        generation_config=writing, continuous_batching_config=batching, timeout=STOP_SECONDS
    ) as manager:
        chosen = manager.continuous_batching_config
        used = {
            "graphs": str(chosen.use_cuda_graph),
            "async": str(chosen.use_async_batching),
            "attention": model.config._attn_implementation,
        }
        return rate_of(lambda tokens: answer_all(manager, prompts, tokens), len(prompts), steps), used


def answer_all(manager: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until all prompts have so many tokens each."""
    begin, missing = time.perf_counter(), len(prompts)
    manager.add_requests(inputs=prompts, max_new_tokens=tokens)
    while missing:
        result = manager.get_result(timeout=POLL_SECONDS)
        if result is None:
            if not manager.is_running() or time.perf_counter() - begin > ROUND_SECONDS:
                spent = time.perf_counter() - begin
                raise RuntimeError(f"{missing} of {len(prompts)} answers did not come in {spent:.0f} s")
        elif result.is_finished():
            if result.error is not None or len(result.generated_tokens) != tokens:
                raise RuntimeError(f"{len(result.generated_tokens)} tokens came of {tokens}: {result.error}")
            missing -= 1
    return time.perf_counter() - begin
