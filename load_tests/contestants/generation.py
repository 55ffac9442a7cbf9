"""The contestants: each answers the same requests greedily, in float32, and gives the tokens that were wanted.

Each computes on a thread that lives only for its own turn. OpenMP keeps a team of threads for every thread that ever
computed, and once there are more of them than cores it puts waiting ones to sleep: an idle contestant would slow down
the one whose turn it is, by a fifth on two cores.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from troupellm.load_tests.contestants.workload import Request

PAGE_SIZE = 16
Result = TypeVar("Result")


class Contestant(Protocol):
    async def start(self, turn: AsyncExitStack) -> None:
        """Get ready for one turn, before the clock starts; `turn` ends it."""

    async def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        """The timed call."""


class Troupe:
    """The embedded engine, all requests at once. The prefix cache is off: repeats ask the same prompts."""

    def __init__(self, folder: Path, *, num_threads: int, num_blocks: int, max_num_seqs: int) -> None:
        self._folder = folder
        self._settings: dict[str, Any] = {
            "dtype": "float32",
            "num_threads": num_threads,
            "enable_prefix_caching": False,
            "num_gpu_blocks_override": num_blocks,
            "block_size": PAGE_SIZE,
            "max_num_seqs": max_num_seqs,
        }
        self._engine: Any = None

    async def start(self, turn: AsyncExitStack) -> None:
        from troupellm.actors.engine.engine import Engine

        self._engine = await turn.enter_async_context(Engine(self._folder, **self._settings))

    async def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in requests]

        async def ask(index: int, request: Request) -> None:
            completion = await self._engine.generate(
                request.prompt, max_tokens=request.output_len, temperature=0.0, ignore_eos=True
            )
            answers[index] = list(completion.token_ids)

        async with anyio.create_task_group() as group:
            for index, request in enumerate(requests):
                group.start_soon(ask, index, request)
        return answers


class Reference:
    """The same checkpoint in `transformers`, loaded once for both of its contestants."""

    def __init__(self, folder: Path, *, num_threads: int) -> None:
        self._folder = folder
        self._num_threads = num_threads
        self._model: Any = None

    async def model(self) -> Any:
        if self._model is None:
            self._model = await on_own_thread(self._load)
        return self._model

    def _load(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(self._num_threads)
        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32, attn_implementation="sdpa")
        return model.eval()


class StaticBatches:
    """`transformers.generate` on left-padded batches in order of arrival; a batch runs to its longest answer."""

    def __init__(self, reference: Reference, *, batch_size: int) -> None:
        self._reference = reference
        self._batch_size = batch_size
        self._model: Any = None

    async def start(self, turn: AsyncExitStack) -> None:
        self._model = await self._reference.model()

    async def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        return await on_own_thread(self._answer, requests)

    def _answer(self, requests: Sequence[Request]) -> list[list[int]]:
        answers: list[list[int]] = []
        for start in range(0, len(requests), self._batch_size):
            answers += self._batch(requests[start : start + self._batch_size])
        return answers

    def _batch(self, batch: Sequence[Request]) -> list[list[int]]:
        import torch

        width = max(len(request.prompt) for request in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        longest = max(request.output_len for request in batch)
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0
            )
        return [output[row, width : width + request.output_len].tolist() for row, request in enumerate(batch)]


class BeamSearch:
    """Its beam search over the prompt of one request; the answers are the beams, best first."""

    def __init__(self, reference: Reference, *, width: int) -> None:
        self._reference = reference
        self._width = width
        self._model: Any = None

    async def start(self, turn: AsyncExitStack) -> None:
        self._model = await self._reference.model()

    async def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        (request,) = requests
        return await on_own_thread(self._search, request)

    def _search(self, request: Request) -> list[list[int]]:
        import torch

        ids = torch.tensor([request.prompt])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.output_len,
                do_sample=False,
                num_beams=self._width,
                num_return_sequences=self._width,
                eos_token_id=None,
                pad_token_id=0,
            )
        beams: list[list[int]] = output[:, len(request.prompt) :].tolist()
        return beams


class ContinuousBatching:
    """`transformers`' continuous batching over a paged cache; its manager starts before the clock does."""

    def __init__(self, reference: Reference, *, page_size: int, num_blocks: int, max_batch_tokens: int) -> None:
        self._reference = reference
        self._settings = {"page_size": page_size, "num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
        self._model: Any = None
        self._manager: Any = None

    async def start(self, turn: AsyncExitStack) -> None:
        """The manager's thread polls while it lives, so it lives only for its own turn."""
        self._model = await self._reference.model()
        self._manager = await on_own_thread(self._start)
        turn.push_async_callback(on_own_thread, partial(self._manager.stop, block=True, timeout=10.0))

    def _start(self) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1),
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False, **self._settings),
        )
        manager.start()
        return manager

    async def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        return await on_own_thread(self._answer, requests)

    def _answer(self, requests: Sequence[Request]) -> list[list[int]]:
        places = {
            self._manager.add_request(request.prompt, max_new_tokens=request.output_len): index
            for index, request in enumerate(requests)
        }
        answers: list[list[int]] = [[] for _ in requests]
        left = len(requests)
        while left:
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
                answers[places[result.request_id]] = list(result.generated_tokens)
                left -= 1
            elif result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped")
        return answers


async def on_own_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Run on a thread that ends with the call, and its OpenMP team with it."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function, *args)
        return await anyio.to_thread.run_sync(future.result)
