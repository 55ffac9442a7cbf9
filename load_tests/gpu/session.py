"""One session on a GPU: correctness, ceilings, then goals while there is time."""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from troupellm.load_tests.gpu import goals
from troupellm.load_tests.gpu.checking import Unfinished, begin, begin_models, kernel_counts, results
from troupellm.load_tests.gpu.correctness import Correctness
from troupellm.load_tests.gpu.engine import LARGE, SMALL
from troupellm.load_tests.gpu.goals import COUNTING, FIRST, GOALS, MODEL, Result
from troupellm.load_tests.gpu.measuring import Measuring
from troupellm.load_tests.kernels.ceilings import Measured
from troupellm.load_tests.kernels.command import ceiling_text
from troupellm.load_tests.kernels.flags import OPERATIONS
from troupellm.load_tests.peers.process import ContestantError, unwinding

MINUTES = 8.0
"""Of a session: a command on a lent machine may take ten."""
CHECK_SHARE = 0.3
"""Of the session's time that checks may take, what is compiled in them included: some minute of a core for the longest
of them. Operations without a verdict by then are not timed."""
MODEL_SECONDS = 30.0
"""For models whose kernels are not compiled yet when everything is checked."""
COUNT_SECONDS = 60.0
"""For counting kernels that were not counted meanwhile."""
CEILING_SECONDS = 90.0
"""The ceilings are given up after that, the start of their process included."""
LAST_SECONDS = 10.0
"""For the ceilings behind all goals."""
LONGER, MARGIN_SECONDS = 2.0, 60.0
"""A goal's process is ended after so many times what it takes, and so long after the session's end."""


def run(argv: Sequence[str], folder: Path) -> int:
    """0 when what was asked for was measured and right, whether goals are kept or not; 2 without a GPU.

    1 when something was wrong, not known or failed, or not one goal has a number.
    """
    parser = argparse.ArgumentParser(description="the GPU's goals on a bare machine", allow_abbrev=False)
    parser.add_argument("--goals", nargs="+", choices=list(GOALS), default=list(FIRST), metavar="GOAL")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which no goal is begun")
    parser.add_argument("--skip-checks", action="store_true", help="correctness was seen in an earlier command")
    parser.add_argument("--result-json", metavar="FILE", help="written after every block")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    session = Session(device, folder, args.result_json, time.monotonic() + 60.0 * args.minutes)
    session.describe()
    if not args.skip_checks:
        session.check(60.0 * args.minutes * CHECK_SHARE)
    with unwinding():
        session.pursue(args.goals, Measuring(device, folder))
    return 1 if session.failed or not session.measured else 0


class Session:
    """The findings so far; written after every block. Computes nothing on the device itself."""

    def __init__(self, device: torch.device, folder: Path, result: str | None, deadline: float) -> None:
        self._device, self._folder, self._result, self._deadline = device, folder, result, deadline
        self._report: dict[str, Any] = {"random weights": True, "routing": "uniform", "goals": []}
        self._checked = Correctness()
        self._kernels = dict[str, int]()
        self._whole, self._late = list[str](), list[str]()
        """Goals that have all of their numbers; those that there was no time for."""
        self.failed = False
        self.measured = 0
        """Goals that have a number."""

    def _write(self) -> None:
        if self._result:
            Path(self._result).write_text(json.dumps(self._report, indent=1), encoding="utf-8")

    def describe(self) -> None:
        from importlib.metadata import version

        names = ("torch", "triton", "transformers")
        self._report["device"] = device_text()
        self._report["versions"] = {"python": platform.python_version(), **{name: version(name) for name in names}}
        print(f"{self._report['device']}, {self._report['versions']}", flush=True)
        self._write()

    def check(self, seconds: float) -> None:
        """Every operation's cases on the device, and attention at real shapes. Operations that need an operation
        that is not right are not timed afterwards."""
        models = begin_models((SMALL, LARGE), self._device, self._folder)
        first = (*MODEL, *(operation for operation in OPERATIONS if operation not in MODEL))
        self._checked = Correctness.of(results(begin(first, self._device, self._folder), seconds))
        self._count(kernel_counts(models, MODEL_SECONDS))
        self.failed = not self._checked.whole
        self._report["correctness"] = msgspec.to_builtins(self._checked)
        self._write()
        print(f"correctness: {self._checked.text()}", flush=True)

    def _count(self, found: dict[str, int | Unfinished]) -> None:
        for model, kernels in found.items():
            if isinstance(kernels, Unfinished):
                print(f"{model}: {kernels.why}", flush=True)  # the measure itself gives the details
            else:
                self._kernels[model] = kernels
        self._report["kernels"] = self._kernels

    def _ceilings(self, when: str, measuring: Measuring) -> Measured | None:
        """None where even those fail that everything is divided by."""
        try:
            found, self._report[f"clocks {when}"] = measuring.ceilings(CEILING_SECONDS)
        except ContestantError as error:
            self.failed = True
            self._report[f"ceilings {when}"] = str(error)
            self._write()
            print(f"ceilings {when}: {error}", flush=True)
            return None
        self._report[f"ceilings {when}"] = msgspec.to_builtins(found)
        self._write()
        print(f"ceilings {when}, {self._report[f'clocks {when}']}: {ceiling_text(found)}", flush=True)
        return found

    def pursue(self, names: Sequence[str], measuring: Measuring) -> None:
        try:
            ceilings = self._ceilings("before", measuring)
            if ceilings is None:
                return
            for name in names:
                result = self._pursued(name, ceilings, measuring)
                self._whole += [] if result.skipped else [name]
                self.measured += bool(result.found)
                self.failed = self.failed or result.failed
                self._report["goals"].append(msgspec.to_builtins(result))
                self._write()
                print(goals.text(result), flush=True)
            if self._late:
                print(f"no time was left for {', '.join(self._late)}: --skip-checks --goals measures them", flush=True)
            self._ceilings("after", measuring)
        finally:
            measuring.close()

    def _pursued(self, name: str, ceilings: Measured, measuring: Measuring) -> Result:
        if objections := self._checked.objections(name):
            return goals.judged(name, {}, {}, objections)
        seconds = GOALS[name].takes(self._whole)
        if (left := self._left()) < seconds:
            self._late.append(name)
            self._report["no time for"] = self._late
            return goals.judged(name, {}, {}, f"it takes {seconds:.0f} s and {max(0.0, left):.0f} are left")
        if name == COUNTING and (missing := [model for model in (SMALL, LARGE) if model not in self._kernels]):
            self._count(kernel_counts(begin_models(missing, self._device, self._folder), COUNT_SECONDS))
        return measuring.pursue(name, ceilings, self._kernels, min(LONGER * seconds, self._left() + MARGIN_SECONDS))

    def _left(self) -> float:
        """Seconds until nothing is begun."""
        return self._deadline - LAST_SECONDS - time.monotonic()


def device_text() -> str:
    """As `nvidia-smi` tells it, or that it does not."""
    query = "--query-gpu=name,driver_version,power.limit"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"
    return done.stdout.strip().splitlines()[0]
