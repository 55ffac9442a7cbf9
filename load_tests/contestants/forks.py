"""Ways of getting several answers to one prompt, and rounds in which each has its turn."""

import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec

from troupellm.load_tests.contestants.generation import PAGE_SIZE, BeamSearch, Reference
from troupellm.load_tests.contestants.workload import Request

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

SEED = 11
_MOST_ID = 1000

Answers = list[list[int]]


class Arm(msgspec.Struct):
    """One way. Lists have an entry per round."""

    name: str
    work: Callable[[], Awaitable[Answers]]
    count: int
    """Answers that it gives."""
    ours: bool = True
    peak_blocks: int | None = None
    """KV blocks in use at once, the most of its first round; None where they are not ours."""
    seconds: list[float] = []
    answers: Answers = []

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)


def settings_of(prompt_len: int, output_len: int, most: int) -> dict[str, Any]:
    """Of an engine with room for `most` independent requests. Nothing is cached, since rounds ask for the same."""
    pages = (prompt_len + output_len) // PAGE_SIZE + 2
    return {
        "device": "cpu",
        "dtype": "float32",
        "block_size": PAGE_SIZE,
        "num_gpu_blocks_override": 2 * most * pages,
        "max_num_seqs": most,
        "enable_prefix_caching": False,
        "spare_worker": False,
    }


class Work:
    """One prompt at one engine."""

    def __init__(self, engine: "Engine", prompt_len: int, output_len: int) -> None:
        self._engine = engine
        draw = random.Random(SEED)
        width = min(engine.limits.vocab_width, _MOST_ID)
        self.prompt = [draw.randrange(3, width) for _ in range(prompt_len)]
        self._length: dict[str, Any] = {"max_tokens": output_len, "ignore_eos": True}

    async def forks(self, count: int) -> Answers:
        completion = await self._engine.generate(self.prompt, n=count, temperature=1.0, seed=SEED, **self._length)
        return [list(choice.token_ids) for choice in completion.choices]

    async def requests(self, count: int) -> Answers:
        """All at once. The first of them is the first fork again."""
        answers: Answers = [[] for _ in range(count)]

        async def ask(number: int) -> None:
            own: dict[str, Any] = {"temperature": 1.0, "seed": SEED + number, **self._length}
            answers[number] = list((await self._engine.generate(self.prompt, **own)).token_ids)

        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(ask, number)
        return answers

    async def beams(self, count: int) -> Answers:
        search: dict[str, Any] = {"n": count, "use_beam_search": True, "temperature": 0.0, **self._length}
        completion = await self._engine.generate(self.prompt, **search)
        return [list(choice.token_ids) for choice in completion.choices]


async def transformers_search(
    folder: Path, prompt: list[int], output_len: int, width: int, threads: int, stack: AsyncExitStack
) -> Callable[[], Awaitable[Answers]]:
    """The same search there, its model loaded."""
    search = BeamSearch(Reference(folder, num_threads=threads), width=width)
    await search.start(stack)
    return lambda: search.answer([Request(prompt=prompt, output_len=output_len)])


async def compete(engine: "Engine", arms: list[Arm], repeats: int, output_len: int) -> None:
    """A first round warms up and counts blocks; then each has its turn in every round, in an order that changes."""
    from tqdm import tqdm

    with tqdm(total=(repeats + 1) * len(arms), unit="run") as bar:
        for number in range(repeats + 1):
            for arm in arms if number % 2 else arms[::-1]:
                bar.set_description(arm.name)
                if number:
                    begin = time.perf_counter()
                    arm.answers = await arm.work()
                    arm.seconds.append(time.perf_counter() - begin)
                elif arm.ours:
                    arm.peak_blocks, arm.answers = await counted(engine, arm.work)
                else:
                    arm.answers = await arm.work()
                bar.update()
                if [len(answer) for answer in arm.answers] != [output_len] * arm.count:
                    raise RuntimeError(f"{arm.name}: an answer is missing or has not the wanted number of tokens")


async def counted(engine: "Engine", work: Callable[[], Awaitable[Answers]]) -> tuple[int, Answers]:
    """The most blocks in use at once, which are looked at in every turn of the event loop, and the answers."""
    peak, over = 0, anyio.Event()
    answers: Answers = []

    async def run() -> None:
        answers.extend(await work())
        over.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        while not over.is_set():
            peak = max(peak, engine.snapshot().scheduler.blocks_used)
            await anyio.lowlevel.checkpoint()
    return peak, answers
