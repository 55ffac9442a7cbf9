"""Goals are measured in a process beside the session's, one after the other. A measure that breaks that process's
context, or never ends, costs no other goal; models' times that goals have in common are kept there.

`python -m troupellm.load_tests.gpu.measuring DEVICE` is that process, which lines of JSON ask.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from troupellm.load_tests.gpu import (
    attention,
    beside,
    captures,
    drafts,
    first_tokens,
    gaps,
    goals,
    guided,
    idling,
    memory,
    prefixes,
    restoring,
    workloads,
)
from troupellm.load_tests.gpu.clocks import clocks_under_load
from troupellm.load_tests.gpu.engine import LARGE, SMALL, SPARSE, Models
from troupellm.load_tests.gpu.gathered import Found, Partly
from troupellm.load_tests.gpu.goals import Result
from troupellm.load_tests.kernels.ceilings import Measured, measure_ceilings
from troupellm.load_tests.peers.environments import TROUPE, environment_of, link_package
from troupellm.load_tests.peers.process import Contestant, ContestantError, unwinding
from troupellm.protocol.errors import TroupeError

CEILING_SECONDS = 0.3
END_SECONDS = 8.0
"""The time that a process has to finish its work once its parent is gone; then it ends."""
LOG_TAIL, LAST_LINES = 4000, 8
"""Characters of the log that are printed of a failure, and lines that its record has."""


def measures(models: Models, kernels: Mapping[str, int]) -> dict[str, Callable[[], Found]]:
    """By goal.

    Args:
        kernels: of a model's step of one sequence, where they were counted.
    """
    device, ceilings = models.device, models.ceilings
    return {
        "G1": partial(models.decode, LARGE, (1, 32, 256)),
        "G2": partial(models.decode, LARGE, (1, 32, 256), "fp8"),
        "G3": partial(models.decode, SMALL, (1,)),
        "G4": partial(models.decode, SPARSE, (1, 32)),
        "G5": partial(models.tax, kernels),
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
        "G16": partial(beside.beside_transformers, models),
        "G17": partial(captures.all_sizes, models),
        "G18": partial(prefixes.hit, models),
        "G19": partial(restoring.from_host, models),
        "G20": partial(drafts.verified, models),
        "G21": partial(guided.per_token, models),
        "G22": models.invariant,
        "G23": models.small_cache,
        "G24": partial(prefixes.common, models),
        "G25": partial(memory.cache_share, models),
        "G26": partial(first_tokens.idle_server, models),
        "G27": partial(gaps.while_prompts_come, models),
    }


def pursued(name: str, measure: Callable[[], Found]) -> Result:
    """The outcome of a goal, also if its measure raises."""
    found: Found = {}, {}
    begin, why, failed = time.monotonic(), "", False
    try:
        with torch.inference_mode():
            found = measure()
    except Partly as partly:
        found, why, failed = partly.found, partly.why, partly.failed
    except TroupeError as error:  # what is not built refuses by name
        why = error.message
    except Exception as error:
        traceback.print_exc()
        why, failed = f"{type(error).__name__}: {error}"[:300], True
    return goals.judged(name, *found, why, failed=failed, seconds=time.monotonic() - begin)


class Measuring:
    """That process, seen from the session: started when it is asked, and anew after it broke."""

    def __init__(self, device: torch.device, folder: Path, code: tuple[str, ...] = ("-m", __name__)) -> None:
        """code: for the interpreter."""
        self.command = [sys.executable, *code, device.type]
        self._folder, self._log = folder, folder / "goals.log"
        self.process: Contestant | None = None

    def ceilings(self, timeout: float) -> tuple[Measured, str]:
        """And the clocks beside them.

        Raises:
            ContestantError: it broke, or took longer than `timeout` seconds.
        """
        reply = self._ask(timeout, do="ceilings")
        return msgspec.convert(reply["ceilings"], Measured), reply["clocks"]

    def pursue(self, name: str, ceilings: Measured, kernels: Mapping[str, int], timeout: float) -> Result:
        """Measure a goal, in so many seconds. Where that fails, the end of what was logged meanwhile is printed."""
        logged = len(self._logged())
        told = {"ceilings": msgspec.to_builtins(ceilings), "kernels": kernels}
        try:
            reply = self._ask(timeout, do="pursue", goal=name, **told)
            result = msgspec.convert(reply["result"], Result)
        except ContestantError as error:
            said, *log = str(error).splitlines()
            result = goals.judged(name, {}, {"last lines": log[-LAST_LINES:]}, said, failed=True)
        if result.failed:
            print(self._logged()[logged:][-LOG_TAIL:], flush=True)
        if name in goals.PROFILED:
            self.close()
        return result

    def _ask(self, timeout: float, **request: Any) -> dict[str, Any]:
        if self.process is None:
            environment = environment_of(TROUPE, Path(sys.executable), link_package(self._folder / "import"), 1)
            self.process = Contestant("goals", self.command, environment=environment, log=self._log)
        try:
            reply = self.process.ask(timeout, **request)
        except BaseException:
            self.close()
            raise
        if not reply["sound"]:
            self.close()
        return reply

    def _logged(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.close()
            self.process = None


class Measurer:
    """Answers requests in that process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: Models | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        reply = self._ceilings() if request["do"] == "ceilings" else self._pursue(request)
        return {**reply, "sound": self._sound()}

    def _ceilings(self) -> dict[str, Any]:
        with torch.inference_mode():
            found = measure_ceilings(self._device, CEILING_SECONDS)
            return {"ceilings": msgspec.to_builtins(found), "clocks": clocks_under_load(self._device)}

    def _pursue(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._models is None:
            self._models = Models(self._device, msgspec.convert(request["ceilings"], Measured), Path.cwd())
        measure = measures(self._models, request["kernels"])[request["goal"]]
        return {"result": msgspec.to_builtins(pursued(request["goal"], measure))}

    def _sound(self) -> bool:
        """Whether the device still works for this process: some errors stay until it ends."""
        try:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.synchronize(self._device)
            return bool(torch.ones(8, device=self._device).sum() == 8)
        except Exception:
            traceback.print_exc()
            return False


def requests() -> Iterator[str]:
    """Lines of the standard input. Their end is the end of the parent: it interrupts the present measure."""
    lines = queue.Queue[str]()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END_SECONDS)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is for the log
    torch.manual_seed(0)
    measurer = Measurer(torch.device(sys.argv[-1]))
    with unwinding():
        for line in requests():
            replies.write(json.dumps(measurer.answer(json.loads(line))) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
