"""A model worker that does harm, for processes that tests start: named by its import path, never by a request.

Harm comes from a prompt that holds a marker token, or from a file named `fault` in the model's folder, which is used up
by the step that finds it: a fault by the next one, a wrong reply by the next one that has tokens. A file named `doomed`
there ends every step's process. Where there is one named `oom_kills`, the marker token ends the process as the kernel
does when there is no memory: it adds to the count, which is the size of that file, and kills.
"""

import ctypes
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from troupellm.models.worker.worker import LaunchedStep, ModelWorker
from troupellm.protocol.messages.worker import NewRow, RowError, RowLogprobs, StepPlan, StepResult

FACTORY: Final = "troupellm.tests.support.workers.faulty_worker:FaultyWorker"
POISON: Final = 33
"""Token that ends the process: `B` of the tiny model's tokenizer."""
SICK: Final = 34
"""Token that fails its row: `C`."""


class FaultyWorker(ModelWorker):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._fault = folder / "fault"
        self._doomed = folder / "doomed"
        self._oom_kills = folder / "oom_kills"
        self._poisoned: set[int] = set()
        self._sick: set[int] = set()

    def collect(self, ticket: LaunchedStep) -> StepResult:
        plan = ticket.plan
        self._poisoned.update(new.row for new in plan.new_rows if POISON in _prompt(new))
        self._sick.update(new.row for new in plan.new_rows if SICK in _prompt(new))
        if not self._poisoned.isdisjoint(plan.rows):
            if self._oom_kills.exists():
                with self._oom_kills.open("ab") as file:
                    file.write(b".")
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(9)
        if self._doomed.exists():
            os._exit(9)
        name = self._fault.read_text() if self._fault.exists() else ""
        if name in FAULTS:
            self._fault.unlink()
            FAULTS[name](plan)
        result = super().collect(ticket)
        if name in REPLIES and result.tokens:
            self._fault.unlink()
            return REPLIES[name](result)
        errors = tuple(RowError(row, "this row cannot go on") for row in plan.rows if row in self._sick)
        return _changed(result, errors=errors) if errors else result


def _prompt(new: NewRow) -> list[int]:
    return memoryview(new.token_ids).cast("i").tolist()[: new.num_prompt_tokens]


def _changed(result: StepResult, **fields: object) -> StepResult:
    return msgspec.structs.replace(result, **fields)


def _unreadable(row: int) -> RowLogprobs:
    return RowLogprobs(row=row, position=0, width=0, token_ids=b"", logprobs=b"", ranks=bytes(4))


def _write(data: bytes) -> None:
    """To the engine, past the frames."""
    os.write(int(sys.argv[1]), data)


def _spin(plan: StepPlan) -> None:
    while True:
        pass


def _sleep(plan: StepPlan) -> None:
    time.sleep(3600)


def _fail(plan: StepPlan) -> None:
    raise ValueError(f"step {plan.step} cannot be computed")


def _crash(plan: StepPlan) -> None:
    ctypes.string_at(0)


FAULTS: Final[dict[str, Callable[[StepPlan], None]]] = {
    "spin": _spin,
    "sleep": _sleep,
    "fail": _fail,
    "crash": _crash,
    "exit": lambda plan: os._exit(7),
    "truncated": lambda plan: (_write(b"\xff\x00\x00\x00half a fra"), os._exit(0)),
    "oversized": lambda plan: _write(b"\xff\xff\xff\xff"),
    "unknown": lambda plan: _write(b"\x06\x00\x00\x00\x81\xa4type\x05"),
    "pickle": lambda plan: _write((len(_PICKLED)).to_bytes(4, "little") + _PICKLED),
    "speak": lambda plan: print("a word from the worker\nand another", file=sys.stderr, end=""),
}
_PICKLED: Final = pickle.dumps(Path("x"))
REPLIES: Final[dict[str, Callable[[StepResult], StepResult]]] = {
    "wrong shape": lambda result: _changed(result, token_counts=(*result.token_counts, 1)),
    "id out of range": lambda result: _changed(result, tokens=tuple(2**30 for _ in result.tokens)),
    "missing row": lambda result: _changed(result, rows=result.rows[1:], epochs=result.epochs[1:]),
    "stale epoch": lambda result: _changed(result, engine_epoch=result.engine_epoch - 1),
    "no tokens": lambda result: _changed(result, token_counts=tuple(0 for _ in result.rows), tokens=()),
    "log-probabilities without width": lambda result: _changed(result, logprobs=(_unreadable(result.rows[0]),)),
}
