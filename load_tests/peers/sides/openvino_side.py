"""OpenVINO GenAI: its continuous batching on an IR that optimum-intel exports, as its documentation advises.

At fp32 the arithmetic and the cache are float32; at int8 the weights are 8 bits per channel and all else is as it comes
(activations quantized dynamically, the cache in 8 bits).
"""

import gc
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any


class OpenVino:
    def __init__(self, *, model: str, precision: str, threads: int, sequences: int, length: int, tokens: int) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = tokens // 32 + 2 * sequences
        scheduler.max_num_seqs = max(sequences, 1)
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            **({"KV_CACHE_PRECISION": "f32"} if precision == "fp32" else {}),
        }
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.versions = {name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")}

    def answer(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        config.set_eos_token_id(0)  # it wants to have one that it can ignore
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]


make = OpenVino


def prepare(*, source: str, target: str, precision: str) -> dict[str, Any]:
    """Export a Hugging Face folder to an IR, with the tokenizer that the pipeline insists on."""
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import PreTrainedTokenizerFast

    bits = OVWeightQuantizationConfig(bits=8) if precision == "int8" else None
    options: dict[str, Any] = {"load_in_8bit": False} if bits is None else {"quantization_config": bits}
    exported = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, **options)
    exported.save_pretrained(target)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_with_a_merge(Path(source) / "tokenizer.json"))
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    save_model(encoder, Path(target) / "openvino_tokenizer.xml")
    save_model(decoder, Path(target) / "openvino_detokenizer.xml")
    gc.collect()
    return {}


def _with_a_merge(file: Path) -> Any:
    """The tokenizer as one that splits, merges and has a special token, which the converter insists on."""
    from tokenizers import AddedToken, Tokenizer

    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary["aa"] = vocabulary.pop(last)
    content["model"]["merges"] = [["a", "a"]]
    content["pre_tokenizer"]["use_regex"] = True
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return tokenizer
