"""The two contestants: each turns the same texts into vectors of unit length, tokenization included."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from troupellm.load_tests.contestants.generation import on_own_thread

Vectors = list[list[float]]


class Contestant(Protocol):
    async def start(self, turn: AsyncExitStack) -> None:
        """Get ready for one turn, before the clock starts; `turn` ends it."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """The timed call."""


class Troupe:
    """The embedded engine, all texts at once."""

    def __init__(self, folder: Path, *, num_threads: int) -> None:
        self._folder = folder
        self._num_threads = num_threads
        self._engine: Any = None

    async def start(self, turn: AsyncExitStack) -> None:
        from troupellm.actors.engine.engine import Engine

        engine = Engine(self._folder, dtype="float32", device="cpu", num_threads=self._num_threads)
        self._engine = await turn.enter_async_context(engine)
        await self._engine.embed("warm up")

    async def embed(self, texts: Sequence[str]) -> Vectors:
        vectors: Vectors = await self._engine.embed(list(texts))
        return vectors


class Batches:
    """sentence-transformers' batching over `transformers`: texts sorted by length, padded batches, mean over the mask,
    unit length."""

    def __init__(self, folder: Path, *, num_threads: int, batch_size: int, max_length: int) -> None:
        self._folder = folder
        self._num_threads = num_threads
        self._batch_size = batch_size
        self._max_length = max_length
        self._parts: tuple[Any, Any] | None = None

    async def start(self, turn: AsyncExitStack) -> None:
        if self._parts is None:
            self._parts = await on_own_thread(self._load)

    async def embed(self, texts: Sequence[str]) -> Vectors:
        return await on_own_thread(lambda: self._embed(texts))

    def _load(self) -> tuple[Any, Any]:
        from troupellm.models.processes.preload_torch import preload_torch

        preload_torch()
        import torch
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(self._folder)
        model = transformers.AutoModel.from_pretrained(self._folder, dtype=torch.float32).eval()
        return tokenizer, model

    def _embed(self, texts: Sequence[str]) -> Vectors:
        import torch
        from torch.nn import functional

        assert self._parts is not None
        tokenizer, model = self._parts
        torch.set_num_threads(self._num_threads)
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: Vectors = [[] for _ in texts]
        with torch.inference_mode():
            for start in range(0, len(order), self._batch_size):
                members = order[start : start + self._batch_size]
                batch = tokenizer(
                    [texts[index] for index in members],
                    padding=True,
                    truncation=True,
                    max_length=self._max_length,
                    return_tensors="pt",
                )
                mask = batch["attention_mask"][:, :, None]
                means = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
                for index, vector in zip(members, functional.normalize(means, dim=1).tolist(), strict=True):
                    vectors[index] = vector
        return vectors
