"""Command line options that the trainers share."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch


class Resumable(Protocol):
    def restore(self) -> None:
        """Go on from the state file."""

    def export(self, folder: Path) -> None:
        """Write what is shipped."""

    def run(self) -> None:
        """To the end, and export."""


def start(
    parser: argparse.ArgumentParser,
    make: Callable[[argparse.Namespace], Resumable],
    *,
    state: str,
    output: Path,
    threads: int,
) -> None:
    """Add the flags that all trainers have, read them all, and run.

    Args:
        state, output, threads: what the flags say unless told otherwise.
    """
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--state", type=Path, default=Path(state))
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--resume", action="store_true", help="go on from the state file")
    parser.add_argument("--export-only", action="store_true", help="export the state file and stop")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer = make(options)
    if options.resume or options.export_only:
        trainer.restore()
    if options.export_only:
        trainer.export(options.output)
    else:
        trainer.run()
