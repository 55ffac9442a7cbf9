"""One session on a GPU: correctness, ceilings, then goals while there is time."""

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from troupellm.load_tests.gpu import (
    attention,
    captures,
    drafts,
    first_tokens,
    gaps,
    goals,
    guided,
    idling,
    prefixes,
    restoring,
    workloads,
)
from troupellm.load_tests.gpu.checking import Unfinished, begin, begin_models, results
from troupellm.load_tests.gpu.correctness import Correctness
from troupellm.load_tests.gpu.engine import LARGE, SMALL, SPARSE, Models
from troupellm.load_tests.gpu.gathered import Found, Partly
from troupellm.load_tests.gpu.goals import FIRST, GOALS, Result
from troupellm.load_tests.kernels.ceilings import Measured, measure_ceilings
from troupellm.load_tests.kernels.command import ceiling_text
from troupellm.load_tests.kernels.flags import OPERATIONS
from troupellm.protocol.errors import TroupeError

CEILING_SECONDS = 0.3
CHECK_SHARE = 0.3
"""Of the session's time that checks may take, what is compiled in them included: some minute of a core for the longest
of them. What is not known by then is not timed; what waits for it would not have had the time either."""
MODEL_SECONDS = 30.0
"""For models whose kernels are not compiled yet when everything is checked."""
LAST_SECONDS = 10.0
"""For the ceilings behind all goals."""


def run(argv: Sequence[str], folder: Path) -> int:
    """0 when what was asked for was measured and right, whether goals are kept or not; 2 without a GPU.

    1 when something was wrong, not known or failed, or not one goal has a number.
    """
    parser = argparse.ArgumentParser(description="the GPU's goals on a bare machine", allow_abbrev=False)
    parser.add_argument("--goals", nargs="+", choices=list(GOALS), default=list(FIRST), metavar="GOAL")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no goal is begun")
    parser.add_argument("--skip-checks", action="store_true", help="correctness was seen in an earlier command")
    parser.add_argument("--result-json", metavar="FILE", help="written after every block")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return 2
    session = Session(torch.device("cuda"), folder, args.result_json, time.monotonic() + 60.0 * args.minutes)
    torch.manual_seed(0)
    session.describe()
    if not args.skip_checks:
        session.check(60.0 * args.minutes * CHECK_SHARE)
    session.pursue(args.goals)
    return 1 if session.failed or not session.measured else 0


class Session:
    """What was found so far; written after every block."""

    def __init__(self, device: torch.device, folder: Path, result: str | None, deadline: float) -> None:
        self._device, self._folder, self._result, self._deadline = device, folder, result, deadline
        self._report: dict[str, Any] = {"random weights": True, "routing": "uniform", "goals": []}
        self._checked = Correctness()
        self.failed = False
        self.measured = 0
        """Goals that have a number."""

    def _write(self) -> None:
        if self._result:
            Path(self._result).write_text(json.dumps(self._report, indent=1), encoding="utf-8")

    def describe(self) -> None:
        from importlib.metadata import version

        names = ("torch", "triton", "transformers")
        self._report["device"] = torch.cuda.get_device_name(self._device)
        self._report["clocks"] = clocks()
        self._report["versions"] = {"python": platform.python_version(), **{name: version(name) for name in names}}
        print(f"{self._report['device']} ({self._report['clocks']}), {self._report['versions']}", flush=True)
        self._write()

    def check(self, seconds: float) -> None:
        """Every operation's cases on the device, and attention at real shapes. What needs something else than what is
        right is not timed afterwards."""
        models = begin_models((SMALL, LARGE), self._device, self._folder)
        self._checked = Correctness.of(results(begin(OPERATIONS, self._device, self._folder), seconds))
        for model, found in results(models, MODEL_SECONDS).items():
            if isinstance(found, Unfinished):
                print(f"{model}: {found.why}", flush=True)  # whoever measures it says more
        self.failed = not self._checked.whole
        self._report["correctness"] = msgspec.to_builtins(self._checked)
        self._write()
        print(f"correctness: {self._checked.text()}", flush=True)

    def _ceilings(self, when: str) -> Measured:
        with torch.inference_mode():
            found = measure_ceilings(self._device, CEILING_SECONDS)
        torch.cuda.empty_cache()  # other processes may need it
        self._report[f"ceilings {when}"] = msgspec.to_builtins(found)
        self._write()
        print(f"ceilings {when}: {ceiling_text(found)}", flush=True)
        return found

    def pursue(self, names: Sequence[str]) -> None:
        ceilings = self._ceilings("before")
        measures = self._measures(ceilings)
        for name in names:
            result = self._pursued(name, measures[name])
            self.measured += bool(result.found)
            self._report["goals"].append(msgspec.to_builtins(result))
            self._write()
            print(goals.text(result), flush=True)
        self._ceilings("after")

    def _pursued(self, name: str, measure: Callable[[], Found]) -> Result:
        if objections := self._checked.objections(name):
            return goals.judged(name, {}, {}, objections)
        left = self._deadline - LAST_SECONDS - time.monotonic()
        if left < GOALS[name].seconds:
            return goals.judged(name, {}, {}, f"it takes {GOALS[name].seconds:.0f} s and {max(0.0, left):.0f} are left")
        try:
            with torch.inference_mode():
                found, details = measure()
        except Partly as partly:
            self.failed = self.failed or partly.failed
            return goals.judged(name, *partly.found, partly.why)
        except TroupeError as error:  # what is not built refuses by name
            return goals.judged(name, {}, {}, error.message)
        except Exception as error:
            self.failed = True
            traceback.print_exc()
            return goals.judged(name, {}, {}, f"{type(error).__name__}: {error}"[:300])
        finally:
            torch.cuda.empty_cache()
        return goals.judged(name, found, details)

    def _measures(self, ceilings: Measured) -> dict[str, Callable[[], Found]]:
        models, device = Models(self._device, ceilings, self._folder), self._device
        return {
            "G1": partial(models.decode, LARGE, (1, 32, 256)),
            "G2": partial(models.decode, LARGE, (1, 32, 256), "fp8"),
            "G3": partial(models.decode, SMALL, (1,)),
            "G4": partial(models.decode, SPARSE, (1, 32)),
            "G5": models.tax,
            "G6": partial(workloads.public, models),
            "G7": partial(workloads.equal, models),
            "G7b": partial(workloads.saturated, models),
            "G8": partial(attention.decode_bandwidth, device, ceilings),
            "G9": partial(attention.skewed, device, ceilings),
            "G10": partial(attention.prefill, device, ceilings),
            "G11": models.prompts,
            "G12": partial(idling.idle_shares, models),
            "G13": models.above_the_worker,
            "G14": models.http,
            "G15": partial(attention.drawing, device, ceilings),
            "G16": models.beside_transformers,
            "G17": partial(captures.all_sizes, models),
            "G18": partial(prefixes.hit, models),
            "G19": partial(restoring.from_host, models),
            "G20": partial(drafts.verified, models),
            "G21": partial(guided.per_token, models),
            "G22": models.invariant,
            "G23": models.small_cache,
            "G24": partial(prefixes.common, models),
            "G25": models.cache_share,
            "G26": partial(first_tokens.idle_server, models),
            "G27": partial(gaps.while_prompts_come, models),
        }


def clocks() -> str:
    """As `nvidia-smi` tells them, or that it does not."""
    query = "--query-gpu=clocks.sm,clocks.mem,driver_version,power.limit"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"
    return done.stdout.strip().splitlines()[0]
