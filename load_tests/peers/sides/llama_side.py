"""llama.cpp by llama-cpp-python's bindings of its C API: one batch of all sequences per step.

The cache is what llama.cpp takes by itself (float16), and flash attention is as it decides; 8 bits are Q8_0.
"""

import ctypes
from importlib.metadata import version
from typing import Any

BATCH_TOKENS = 2048


class LlamaCpp:
    def __init__(self, *, model: str, precision: str, threads: int, sequences: int, length: int, tokens: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not read {model}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads, self._tokens = threads, tokens
        self._context: Any = None
        self._sequences = 0
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}

    def _open(self, sequences: int) -> None:
        """A context for so many sequences; another number of them wants another one."""
        if self._sequences == sequences:
            return
        if self._context is not None:
            self._api.llama_free(self._context)
        options = self._api.llama_context_default_params()
        options.n_ctx = self._tokens
        options.n_batch = BATCH_TOKENS
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = self._threads
        self._context = self._api.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._sequences = sequences

    def answer(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        self._open(len(prompts))
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        batch = self._api.llama_batch_init(BATCH_TOKENS, 0, 1)
        try:
            latest = self._prefill(batch, prompts)
            answers = [[token] for token in latest]
            for step in range(1, output_len):
                entries = [(answers[row][-1], len(prompt) + step - 1, row, True) for row, prompt in enumerate(prompts)]
                self._decode(batch, entries)
                for row in range(len(prompts)):
                    answers[row].append(self._argmax(row))
            return answers
        finally:
            self._api.llama_batch_free(batch)

    def _prefill(self, batch: Any, prompts: list[list[int]]) -> list[int]:
        entries = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        found = []
        for begin in range(0, len(entries), BATCH_TOKENS):
            part = entries[begin : begin + BATCH_TOKENS]
            self._decode(batch, part)
            found += [self._argmax(place) for place, entry in enumerate(part) if entry[3]]
        return found

    def _decode(self, batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        for place, (token, position, row, wanted) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, wanted
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = row
        batch.n_tokens = len(entries)
        if code := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")

    def _argmax(self, place: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


make = LlamaCpp


def prepare(*, source: str, target: str, precision: str) -> dict[str, Any]:
    """Write a Hugging Face folder (Llama or Qwen3) as a GGUF file."""
    from troupellm.load_tests.peers.sides.gguf_file import write_gguf

    write_gguf(source, target, precision)
    return {}
