"""Our side: the embedded engine as it comes, all prompts at once; at int8 the cache is in 8 bits, as OpenVINO's is."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any


class Troupe:
    def __init__(
        self, *, model: str, precision: str, threads: int, sequences: int, length: int, tokens: int, **settings: Any
    ) -> None:
        """
        Args:
            settings: further ones of the engine.
        """
        from troupellm import LLM

        block_size = 16
        if precision == "int8":
            settings = {"quantization": precision, "kv_cache_dtype": precision, **settings}
        self._llm = LLM(
            model,
            dtype="float32",
            num_threads=threads,
            enable_prefix_caching=False,
            max_num_seqs=max(sequences, 1),
            max_model_len=length,
            block_size=block_size,
            num_gpu_blocks_override=tokens // block_size + 2 * sequences,
            **settings,
        )
        self.versions = {name: _version(name) for name in ("troupellm", "torch")}

    def answer(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        from troupellm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


make = Troupe


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"
