"""One session on a GPU: correctness, ceilings, then goals while there is time."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from troupellm.load_tests.flags.operations import OPERATIONS
from troupellm.load_tests.gpu import goals
from troupellm.load_tests.gpu.checking import Unfinished, answers, begin, begin_models, kernel_counts, results
from troupellm.load_tests.gpu.correctness import Correctness
from troupellm.load_tests.gpu.engine import LARGE, SMALL
from troupellm.load_tests.gpu.goals import COUNTING, FIRST, GOALS, HOUR, MODEL, Result
from troupellm.load_tests.gpu.machine import device_text
from troupellm.load_tests.gpu.measuring import Measuring
from troupellm.load_tests.gpu.page import page
from troupellm.load_tests.kernels.ceilings import Measured, ceiling_text
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
FACT_SECONDS, TOKEN_SECONDS = 60.0, 120.0
"""For the facts about the machine, and for the built-in model's tokens, which compiles its kernels."""
CEILING_SECONDS = 90.0
"""The ceilings are given up after that, the start of their process included."""
LAST_SECONDS = 10.0
"""For the ceilings behind all goals."""
LONGER, MARGIN_SECONDS = 2.0, 60.0
"""A goal's process is ended after so many times what it takes, and so long after the session's end."""


def parser_of_session() -> argparse.ArgumentParser:
    """The flags of `load_tests/gpu/run.py`."""
    parser = argparse.ArgumentParser(description="the GPU's goals on a bare machine", allow_abbrev=False)
    parser.add_argument("--goals", nargs="+", choices=list(GOALS), default=list(FIRST), metavar="GOAL")
    parser.add_argument(
        "--hour",
        action="store_true",
        help="all goals in the order of their value, without those that --after has",
    )
    parser.add_argument("--after", metavar="FILE", help="report of an earlier command (default: --result-json's FILE)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which no goal is begun")
    parser.add_argument("--skip-checks", action="store_true", help="correctness was seen in an earlier command")
    parser.add_argument("--result-json", metavar="FILE", help="written after every block")
    parser.add_argument("--page", metavar="FILE", help="the same as a page of Markdown")
    return parser


def run(argv: Sequence[str], folder: Path) -> int:
    """0 when what was asked for was measured and right, whether goals are kept or not; 2 without a GPU.

    1 when something was wrong, not known or failed, or not one goal has a number.
    """
    args = parser_of_session().parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    deadline = time.monotonic() + 60.0 * args.minutes
    session = Session(device, folder, args.result_json, deadline, page_file=args.page)
    wanted = tuple(args.goals)
    if args.hour:
        session.go_on(args.after or args.result_json)
        wanted = tuple(name for name in HOUR if name not in session.whole)
    session.describe()
    if not args.skip_checks:
        session.inspect()
        session.check(60.0 * args.minutes * CHECK_SHARE)
    with unwinding():
        session.pursue(wanted, Measuring(device, folder))
    return 1 if session.failed or not session.measured else 0


class Session:
    """The findings so far; written after every block. Computes nothing on the device itself."""

    def __init__(
        self, device: torch.device, folder: Path, result: str | None, deadline: float, page_file: str | None = None
    ) -> None:
        self._device, self._folder, self._deadline = device, folder, deadline
        self._result, self._page = result, page_file
        self._report: dict[str, Any] = {"random weights": True, "routing": "uniform", "goals": []}
        self.checked = Correctness()
        self.kernels = dict[str, int]()
        self.whole, self._late = list[str](), list[str]()
        """Goals that have all of their numbers; those that there was no time for."""
        self.failed = False
        self.measured = 0
        """Goals that have a number."""

    def _write(self) -> None:
        if self._result:
            Path(self._result).write_text(json.dumps(self._report, indent=1), encoding="utf-8")
        if self._page:
            Path(self._page).write_text(page(self._report), encoding="utf-8")

    def go_on(self, earlier: str | None) -> None:
        """Take over the report of an earlier command, if there is one: its whole goals and right operations count."""
        if earlier is None or not Path(earlier).exists():
            return
        self._report = json.loads(Path(earlier).read_text(encoding="utf-8"))
        found = [result for result in self._report["goals"] if not result["skipped"]]
        self._report["goals"] = found
        self.whole, self.measured = [result["goal"] for result in found], len(found)
        self.kernels = self._report.get("kernels", {})
        self.checked = msgspec.convert(self._report.get("correctness", {}), Correctness)

    def describe(self) -> None:
        """The device and the versions that matter most."""
        from importlib.metadata import version

        names = ("torch", "triton", "transformers")
        self._report["device"] = device_text()
        self._report["versions"] = {"python": platform.python_version(), **{name: version(name) for name in names}}
        print(f"{self._report['device']}, {self._report['versions']}", flush=True)
        self._write()

    def inspect(self) -> None:
        """The facts about the machine, then the built-in model's tokens, each in a process of its own. Those of an
        earlier command count if nothing was wrong with them."""
        if self._report.get("machine", {}).get("launch", "unknown"):
            self._tell("machine", answers("machine", self._device, self._folder, FACT_SECONDS))
        if set(self._report.get("tokens", {}).values()) != {"same"}:
            self._tell("tokens", answers("same_tokens", self._device, self._folder, TOKEN_SECONDS))

    def _tell(self, name: str, found: dict[str, Any]) -> None:
        self._report[name] = found
        self._write()
        print(f"{name}: {found}", flush=True)

    def check(self, seconds: float) -> None:
        """Every operation's cases on the device, and attention at real shapes. Operations that need an operation
        that is not right are not timed afterwards."""
        first = (*MODEL, *(operation for operation in OPERATIONS if operation not in MODEL))
        missing = [operation for operation in first if operation not in self.checked.right]
        models = begin_models([name for name in (SMALL, LARGE) if name not in self.kernels], self._device, self._folder)
        self.checked = self.checked.joined(results(begin(missing, self._device, self._folder), seconds))
        self._count(kernel_counts(models, MODEL_SECONDS))
        self.failed = not self.checked.whole
        self._report["correctness"] = msgspec.to_builtins(self.checked)
        self._write()
        print(f"correctness: {self.checked.text()}", flush=True)

    def _count(self, found: dict[str, int | Unfinished]) -> None:
        for model, kernels in found.items():
            if isinstance(kernels, Unfinished):
                print(f"{model}: {kernels.why}", flush=True)  # the measure itself gives the details
            else:
                self.kernels[model] = kernels
        self._report["kernels"] = self.kernels

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
                self.record(self.pursued(name, ceilings, measuring))
            if self._late:
                print(f"no time was left for {', '.join(self._late)}: --skip-checks --goals measures them", flush=True)
            self._ceilings("after", measuring)
        finally:
            measuring.close()

    def record(self, result: Result) -> None:
        """Print a goal's outcome and add it to the report."""
        self.whole += [] if result.skipped else [result.goal]
        self.measured += bool(result.found)
        self.failed = self.failed or result.failed
        self._report["goals"].append(msgspec.to_builtins(result))
        self._write()
        print(goals.text(result), flush=True)

    def pursued(self, name: str, ceilings: Measured, measuring: Measuring) -> Result:
        if objections := self.checked.objections(name):
            return goals.judged(name, {}, {}, objections)
        seconds = GOALS[name].takes(self.whole)
        if (left := self._left()) < seconds:
            self._late.append(name)
            self._report["no time for"] = self._late
            return goals.judged(name, {}, {}, f"it takes {seconds:.0f} s and {max(0.0, left):.0f} are left")
        if name == COUNTING and (missing := [model for model in (SMALL, LARGE) if model not in self.kernels]):
            self._count(kernel_counts(begin_models(missing, self._device, self._folder), COUNT_SECONDS))
        return measuring.pursue(name, ceilings, self.kernels, min(LONGER * seconds, self._left() + MARGIN_SECONDS))

    def _left(self) -> float:
        """Seconds until nothing is begun."""
        return self._deadline - LAST_SECONDS - time.monotonic()
