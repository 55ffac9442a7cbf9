"""`transformers`: `generate` on the whole batch; 8 bits by torch's dynamic quantization of the linear layers."""

import warnings
from importlib.metadata import version


class Transformers:
    def __init__(self, *, model: str, precision: str, threads: int, sequences: int, length: int, tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
        if precision == "int8":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                network = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
                    network, {torch.nn.Linear}, dtype=torch.qint8
                )
        self._model = network
        self.versions = {name: version(name) for name in ("transformers", "torch")}

    def answer(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return list(output[:, ids.shape[1] :].tolist())


make = Transformers
