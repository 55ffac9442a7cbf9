"""`bench step --beside`: what busy programs beside it cost an engine that takes all cores, and one that takes one."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from troupellm.load_tests.peers.process import unwinding
from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.step.above import filling
from troupellm.load_tests.step.bare import BLOCK_SIZE, BareWorker
from troupellm.protocol.config.engine import EngineConfig

STEP_TOKENS = 2048
PROMPT_TOKENS = 1000
CONTEXT = 128
SETTLING_SECONDS, MEASURED_SECONDS = 0.5, 1.0
"""Of each cell: a worker first learns how busy the machine is. A step of a small model takes a tenth of the time slice
that it may wait for, so a few steps say nothing."""
LEAST_OF_QUIET, LEAST_OF_ONE = 0.45, 0.9
"""The bars: shares of the tokens per second of a quiet machine, beside one busy program, and of `--num-threads 1`."""


class Cell(msgspec.Struct, frozen=True):
    """Tokens per second of one kind of step beside so many busy programs."""

    kind: str
    beside: int
    all_threads: float
    one_thread: float

    @property
    def of_one(self) -> float:
        return self.all_threads / self.one_thread


def run(
    model: str,
    counts: Sequence[int],
    batches: Sequence[int],
    *,
    steps: int,
    repeats: int,
    batch_invariant: bool,
    result: str | None,
) -> int:
    """
    Args:
        counts: of busy programs; 0 is the quiet machine that the others are compared with.
        repeats: turns, in each of which every cell is measured once.
    """
    with unwinding(), ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="troupe-beside-")))
        folder = write_random_model(work / "model", SHAPES[model]) if model in SHAPES else Path(model).absolute()
        workers = [
            stack.enter_context(_worker(folder, number, max(batches), steps, batch_invariant=batch_invariant))
            for number in (None, 1)
        ]
        kinds = [f"decode {batch}" for batch in batches] + [f"prompt {PROMPT_TOKENS}"]
        rates: dict[tuple[str, int, int], list[float]] = {}
        for _ in range(repeats):
            for beside in counts:
                with busy_programs(beside):
                    for kind in kinds:
                        for index, worker in enumerate(workers):
                            rates.setdefault((kind, beside, index), []).append(worker.rate(kind, steps))
    cells = [
        Cell(kind, beside, median(rates[kind, beside, 0]), median(rates[kind, beside, 1]))
        for beside in counts
        for kind in kinds
    ]
    print(table(cells), flush=True)
    if result:
        Path(result).write_text(json.dumps([msgspec.to_builtins(cell) for cell in cells], indent=1), encoding="utf-8")
    return 0


def table(cells: Sequence[Cell]) -> str:
    """A line for each, with its share of the quiet machine's tokens per second where that was measured."""
    quiet = {cell.kind: cell.all_threads for cell in cells if cell.beside == 0}
    lines = [f"{'beside':<8}{'steps':<14}{'all threads':>12}{'one thread':>12}{'of one':>8}{'of quiet':>10}"]
    for cell in cells:
        share = f"{cell.all_threads / quiet[cell.kind]:.2f}" if cell.kind in quiet else "-"
        lines.append(
            f"{cell.beside:<8}{cell.kind:<14}{cell.all_threads:>12,.0f}{cell.one_thread:>12,.0f}{cell.of_one:>8.2f}"
            f"{share:>10}{'' if reaches_bars(cell, quiet) else '  below the bar'}"
        )
    return "\n".join(lines)


def reaches_bars(cell: Cell, quiet: dict[str, float]) -> bool:
    """quiet: tokens per second without a busy program, by kind."""
    if cell.beside == 0:
        return True
    if cell.beside == 1 and cell.all_threads < LEAST_OF_QUIET * quiet.get(cell.kind, 0.0):
        return False
    return cell.of_one >= LEAST_OF_ONE


@contextmanager
def busy_programs(number: int) -> Iterator[None]:
    """So many processes that never wait, ended with the block."""
    with ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)  # before it is waited for
        yield


class _Worker:
    """A bare worker on a thread of its own, as an engine has it: torch keeps a number of threads for each."""

    def __init__(self, line: ThreadPoolExecutor, folder: Path, config: EngineConfig) -> None:
        self._line = line
        self._bare = line.submit(BareWorker, folder, config).result()

    def rate(self, kind: str, steps: int) -> float:
        """Tokens per second of steps of a kind, such as "decode 8", once the worker has settled."""
        name, number = kind.split()
        return self._line.submit(
            self._settled, self._decode if name == "decode" else self._prompt, int(number), steps
        ).result()

    def close(self) -> None:
        self._line.submit(self._bare.close).result()

    def _settled(self, measure: Callable[[int, int], tuple[int, float]], number: int, steps: int) -> float:
        begin = time.perf_counter()
        while time.perf_counter() - begin < SETTLING_SECONDS:
            measure(number, steps)
        tokens, seconds = 0, 0.0
        while seconds < MEASURED_SECONDS:
            more, took = measure(number, steps)
            tokens, seconds = tokens + more, seconds + took
        return tokens / seconds

    def _decode(self, batch: int, steps: int) -> tuple[int, float]:
        """Tokens of the steps, and their seconds."""
        self._bare.fill(batch, CONTEXT, steps)
        begin = time.perf_counter()
        times = self._bare.decode(steps)
        return batch * (len(times) + 1), time.perf_counter() - begin

    def _prompt(self, tokens: int, steps: int) -> tuple[int, float]:
        """Tokens of the prompt, and its seconds."""
        begin = time.perf_counter()
        self._bare.fill(1, tokens, steps)
        return tokens, time.perf_counter() - begin


@contextmanager
def _worker(folder: Path, threads: int | None, most: int, steps: int, *, batch_invariant: bool) -> Iterator[_Worker]:
    width = CONTEXT + steps + BLOCK_SIZE
    blocks = most * (-(-width // BLOCK_SIZE) + 1) + -(-(PROMPT_TOKENS + steps) // BLOCK_SIZE) + 1
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "num_threads": threads,
        "max_num_seqs": most,
        "max_model_len": max(width, PROMPT_TOKENS + steps + BLOCK_SIZE),
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": blocks,
        "batch_invariant": batch_invariant,
        "enable_prefix_caching": False,
        **filling(STEP_TOKENS + most),
    }
    with ThreadPoolExecutor(1) as line:
        worker = _Worker(line, folder, EngineConfig.from_flat(settings))
        try:
            yield worker
        finally:
            worker.close()
