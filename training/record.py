"""The training record of the weights in a folder: one entry per stage, in a file beside the weights."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "training.json"
FROM_NOTHING = "from nothing"
CONTINUED = "from the weights of the stage before, sums and differences more often, operands of every size"
Counts = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of the trainer, and what the weights knew after it.

    Attributes:
        text: where it began and what it read.
        minutes: by the clock, breaks left out.
        threads: given to it; it uses fewer while the machine is shared.
        rate: the peak of the learning rate.
        accuracy: passed and asked per task; empty until the card is rebuilt.
    """

    text: str
    minutes: float
    threads: int
    rate: float
    steps: int
    tokens: int
    accuracy: Counts = field(default_factory=dict)


def read(folder: Path) -> list[Stage]:
    """The stages of the weights in a folder, the first one first."""
    stages = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return [
        Stage(**stage | {"accuracy": {task: (counts[0], counts[1]) for task, counts in stage["accuracy"].items()}})
        for stage in stages
    ]


def write(folder: Path, stages: list[Stage]) -> None:
    """The inverse of ``read``."""
    text = json.dumps([asdict(stage) for stage in stages], indent=1, ensure_ascii=False) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")
