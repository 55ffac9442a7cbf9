"""A model worker that does harm, for processes that tests start: named by its import path, never by a request.

Harm comes from a prompt that holds a marker token, or from a file named `fault` in the model's folder, which is used up
by the step that finds it.
"""

import ctypes
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from troupellm.models.worker import LaunchedStep, ModelWorker
from troupellm.protocol.worker import NewRow, StepPlan, StepResult

FACTORY: Final = "faulty_worker:FaultyWorker"
POISON: Final = 33
"""Token that ends the process: `B` of the tiny model's tokenizer."""


class FaultyWorker(ModelWorker):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._fault = folder / "fault"
        self._poisoned: set[int] = set()

    def collect(self, ticket: LaunchedStep) -> StepResult:
        plan = ticket.plan
        self._poisoned.update(new.row for new in plan.new_rows if POISON in _prompt(new))
        if not self._poisoned.isdisjoint(plan.rows):
            os._exit(9)
        if self._fault.exists():
            name = self._fault.read_text()
            self._fault.unlink()
            FAULTS[name](plan)
        return super().collect(ticket)


def _prompt(new: NewRow) -> list[int]:
    return memoryview(new.token_ids).cast("i").tolist()[: new.num_prompt_tokens]


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
