"""The GPU script's session: what it makes of checks and measures that are wrong, late, break or never end."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from troupellm.load_tests.flags.operations import OPERATIONS
from troupellm.load_tests.gpu import checking, goals, measuring, session
from troupellm.load_tests.gpu.checking import MODEL, Unfinished, begin, kernel_counts, results
from troupellm.load_tests.gpu.correctness import Correctness
from troupellm.load_tests.gpu.gathered import Found, Gathered
from troupellm.load_tests.gpu.measuring import Measuring
from troupellm.load_tests.gpu.page import page
from troupellm.load_tests.kernels.checks import Check
from troupellm.protocol.errors import ConfigError
from troupellm.tests.support.gpu.gpu_models import CEILINGS, CPU

RIGHT, WRONG = Check("rope", "one", 0.5), Check("rope", "two", 3.0)
AT_ONCE = {"x": 1.0}
STARTS = 90.0
"""Seconds for a process that imports torch on a busy machine."""


@pytest.mark.slow
def test_operations_are_checked_side_by_side(tmp_path: Path) -> None:
    found = results(begin(("silu_mul", "no_operation"), CPU, tmp_path), 180.0)
    assert isinstance(found["silu_mul"], list)
    assert len(found["silu_mul"]) > 2
    assert all(one.right for one in found["silu_mul"])
    assert found["no_operation"] == Unfinished("KeyError: 'no_operation'")
    late = begin(("silu_mul",), CPU, tmp_path)
    assert results(late, 0.0) == {"silu_mul": Unfinished("it was not done in time", late=True)}
    assert late["silu_mul"].returncode == -signal.SIGKILL


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., checking.Processes]:
    """Processes that run some code in the place of checks."""

    def begun(**tasks: str) -> checking.Processes:
        monkeypatch.setattr(checking, "__name__", "check_nothing")
        monkeypatch.setattr(checking, "link_package", lambda folder: tmp_path)
        (tmp_path / "check_nothing.py").write_text(f"import os, sys, time\nexec({tasks!r}[sys.argv[1]])\n")
        return begin(tasks, CPU, tmp_path)

    return begun


def test_one_late_check_makes_no_other_one_late(printing: Callable[..., checking.Processes]) -> None:
    """Whose process has ended by then, whether it is asked before or after."""
    running = printing(late="time.sleep(600)", broken="print('x'); sys.exit('no memory')", done="print('[]')")
    for name in ("broken", "done"):
        running[name].wait(timeout=STARTS)
    late = Unfinished("it was not done in time", late=True)
    assert results(running, 0.0) == {"late": late, "broken": Unfinished("no memory"), "done": []}
    models = printing(**{MODEL + "m": "print('a warning'); print(364)"})
    models[MODEL + "m"].wait(timeout=STARTS)
    assert kernel_counts(models, 0.0) == {"m": 364}


def test_checks_have_a_core_each(printing: Callable[..., checking.Processes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    running = printing(model="print(os.environ['OMP_NUM_THREADS'] + os.environ['TROUPE_NATIVE'])")
    assert kernel_counts(running, STARTS) == {"model": 10}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Any]], session.Session]:
    """A session whose operations were found so."""

    def made(found: dict[str, Any]) -> session.Session:
        begun = list[list[str]]()
        told = {name: found.get(name, [RIGHT]) for name in OPERATIONS}
        monkeypatch.setattr(session, "begin", lambda tasks, *_: begun.append(list(tasks)))
        monkeypatch.setattr(session, "begin_models", lambda names, *_: begun.append(list(names)))
        monkeypatch.setattr(session, "results", lambda *_: told)
        monkeypatch.setattr(session, "kernel_counts", lambda *_: {"small": 9, "large": Unfinished("no memory")})
        one = session.Session(CPU, tmp_path, str(tmp_path / "result.json"), float("inf"))
        one.check(1.0)
        models, operations = begun
        assert models == [session.SMALL, session.LARGE]
        assert operations[: len(goals.MODEL)] == list(goals.MODEL)  # which most goals wait for
        assert sorted(operations) == sorted(OPERATIONS)
        return one

    return made


class Instantly:
    """In the place of the process that measures."""

    def __init__(self, measure: Callable[[], Found] = lambda: (AT_ONCE, {})) -> None:
        self.asked, self.limits, self._measure = list[str](), list[float](), measure

    def pursue(self, name: str, *told: Any) -> goals.Result:
        self.asked.append(name)
        self.limits.append(told[-1])
        return measuring.pursued(name, self._measure)


def test_a_wrong_operation_stops_only_the_goals_that_need_it(
    checked: Callable[..., session.Session], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it is timed, and all else is."""
    one = checked(
        {
            "grouped_linear": Unfinished("it ended with 1"),
            "fused_moe": Unfinished("it was not done in time", late=True),
            "decode_attention": [RIGHT, WRONG],
            "row_codes": [WRONG],
        }
    )
    assert one.failed
    report = json.loads((tmp_path / "result.json").read_text())
    told = report["correctness"]
    assert told["wrong"] == {"decode_attention": ["two: 3 times"], "row_codes": ["two: 3 times"]}
    assert (told["late"], told["broken"]) == (["fused_moe"], {"grouped_linear": "it ended with 1"})
    assert told["worst"]["rms_norm"] == 0.5
    assert report["kernels"] == {"small": 9}
    timed: Any = Instantly()
    results = {name: one.pursued(name, CEILINGS, timed) for name in goals.GOALS}
    assert timed.asked == ["G10", "G15"]
    assert results["G8"].skipped == "decode_attention is wrong (two: 3 times)"
    assert results["G2"].skipped.count("is wrong") == 2
    assert "fused_moe was not checked in time" in results["G4"].skipped
    assert "large: no memory" in capsys.readouterr().out


def test_an_operation_that_nothing_waits_for_holds_nothing_up(checked: Callable[..., session.Session]) -> None:
    one = checked({"grouped_linear": [WRONG]})
    assert one.failed
    assert not any(one.checked.objections(name) for name in goals.GOALS)
    assert not checked({}).failed


def test_every_operation_that_a_goal_needs_is_checked() -> None:
    assert {operation for goal in goals.GOALS.values() for operation in goal.needs} <= set(OPERATIONS)
    assert all(goal.needs for goal in goals.GOALS.values())
    assert Correctness().whole  # where checks were left out


def test_no_goal_is_begun_that_is_not_done_in_time(tmp_path: Path) -> None:
    timed: Any = Instantly()
    seconds = goals.GOALS["G3"].seconds

    def pursued(left: float) -> goals.Result:
        return session.Session(CPU, tmp_path, None, time.monotonic() + left).pursued("G3", CEILINGS, timed)

    assert "are left" in pursued(0.0).skipped
    assert "are left" in pursued(seconds + session.LAST_SECONDS / 2).skipped  # the last ceilings need theirs, too
    assert not timed.asked
    pursued(seconds + session.LAST_SECONDS + 1)
    pursued(10 * seconds)
    assert timed.limits[0] <= min(session.LONGER * seconds, seconds + session.MARGIN_SECONDS + 1)
    assert timed.limits[1] == session.LONGER * seconds


def test_the_first_goals_fit_behind_checks_that_take_all_of_their_time() -> None:
    ceilings = 25.0  # a process starts, and measures for some seconds
    taken = [goals.GOALS[name].takes(goals.FIRST[:number]) for number, name in enumerate(goals.FIRST)]
    whole = 60.0 * session.MINUTES
    assert whole * session.CHECK_SHARE + ceilings + sum(taken) + session.LAST_SECONDS <= whole
    assert goals.GOALS["G16"].takes(()) > goals.GOALS["G16"].takes(("G3", "G1")) > 0


def test_goals_without_time_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A goal whose shared times are there is begun with less time left."""
    result = tmp_path / "result.json"
    left = goals.GOALS["G16"].seconds_behind + session.LAST_SECONDS + 5
    one = session.Session(CPU, tmp_path, str(result), time.monotonic() + left)
    monkeypatch.setattr(one, "_ceilings", lambda *_: CEILINGS)
    timed: Any = Instantly()
    timed.close = lambda: None
    one.pursue(("G16", "G3", "G1"), timed)
    assert timed.asked == ["G3"]
    assert "no time was left for G16, G1:" in capsys.readouterr().out
    assert json.loads(result.read_text())["no time for"] == ["G16", "G1"]
    one.whole.append("G1")
    one.pursue(("G16",), timed)
    assert timed.asked == ["G3", "G16"]


def test_kernels_that_were_not_counted_are_counted_for_their_goal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "begin_models", lambda names, *_: list(names))
    monkeypatch.setattr(session, "kernel_counts", lambda names, _: dict.fromkeys(names, 5))
    one, timed = session.Session(CPU, tmp_path, None, float("inf")), Instantly()
    one.kernels = {session.SMALL: 4}
    one.pursued("G5", CEILINGS, timed)  # type: ignore[arg-type]
    assert one.kernels == {session.SMALL: 4, session.LARGE: 5}


@pytest.mark.parametrize(
    ("error", "failed"), [(RuntimeError("no memory"), True), (ConfigError("does not fit", param="x"), False)]
)
def test_a_part_that_fails_leaves_the_others_their_numbers(
    error: Exception, failed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> Found:
        gathered = Gathered()
        for batch in (1, 256):
            with gathered.part(f"batch {batch}"):
                if batch > 1:
                    raise error
                gathered.found[f"batch {batch}"] = 0.9
        return gathered.all()

    result = measuring.pursued("G1", measure)
    assert (result.found, result.kept) == ({"batch 1": 0.9}, {"batch 1": True})
    assert result.skipped.startswith("batch 256: ")
    assert result.failed == failed
    assert capsys.readouterr().out == "batch 1: 0.9, None\n"


def test_a_session_without_a_number_does_not_end_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session.Session, "describe", lambda self: None)
    monkeypatch.setattr(Measuring, "ceilings", lambda self, timeout: (CEILINGS, "clocks"))
    monkeypatch.setattr(Measuring, "pursue", lambda self, name, *_: goals.judged(name, {"batch 1": 0.5}, {}))
    argv = ["--skip-checks", "--goals", "G3"]
    assert session.run([*argv, "--minutes", "0"], tmp_path) == 1
    assert session.run([*argv, "--minutes", "5"], tmp_path) == 0


BROKEN = """
import os, signal, sys, time
import torch
from troupellm.load_tests.gpu import measuring
from troupellm.load_tests.kernels.ceilings import Measured

def die():
    print("the last line", flush=True)
    os._exit(3)

def hang():
    try:
        time.sleep(600)
    finally:
        print("its server was closed", flush=True)

def sticky(*_, **more):
    torch.ones = sticky
    raise RuntimeError("an illegal memory access")

class Models:
    seconds = 0
    def __init__(self, *_):
        print("models are made", flush=True)
    def measure(self):
        print("printed for the log")
        self.seconds += 1
        return {"x": float(self.seconds)}, {}

measuring.Models = Models
measuring.measures = lambda models, kernels: {
    "G1": models.measure, "G2": die, "G3": hang, "G4": sticky, "G5": lambda: ({"8b": kernels["large"]}, {}),
    "G12": models.measure,
}
measuring.measure_ceilings = lambda *_: Measured(device="made up", read=2.0, copy=1.0)
measuring.clocks_under_load = lambda _: "1980 MHz"
measuring.main()
"""


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Measuring]:
    measuring = Measuring(CPU, tmp_path, ("-c", BROKEN))
    yield measuring
    measuring.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_goal_that_breaks_or_hangs_leaves_the_others_alone(
    broken: Measuring, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    one = session.Session(CPU, tmp_path, str(result), float("inf"))
    limits = iter([STARTS, STARTS, 3.0, *[STARTS] * 5])  # the third one hangs
    pursue = Measuring.pursue
    monkeypatch.setattr(Measuring, "pursue", lambda self, *told: pursue(self, *told[:-1], next(limits)))
    one.kernels = {"large": 364}
    monkeypatch.setattr(session, "SMALL", "large")
    monkeypatch.setattr(session, "LARGE", "large")
    one.pursue(["G1", "G1", "G3", "G2", "G4", "G5", "G12", "G1"], broken)
    report = json.loads(result.read_text())
    found = [(told["goal"], told["found"], told["failed"]) for told in report["goals"]]
    assert found[:2] == [("G1", {"x": 1.0}, False), ("G1", {"x": 2.0}, False)]  # what models know is kept
    assert found[2:5] == [("G3", {}, True), ("G2", {}, True), ("G4", {}, True)]
    assert found[5:] == [("G5", {"8b": 364}, False), ("G12", {"x": 1.0}, False), ("G1", {"x": 1.0}, False)]
    hung, died, stuck = report["goals"][2:5]
    assert died["details"]["last lines"][-1] == "the last line"
    assert "its process ended" in died["skipped"]
    assert "no answer in 3 s" in hung["skipped"]
    assert stuck["skipped"] == "RuntimeError: an illegal memory access"
    assert report["ceilings before"]["read"] == report["ceilings after"]["read"] == 2.0
    assert (report["clocks before"], report["clocks after"]) == ("1980 MHz", "1980 MHz")
    assert one.failed
    assert one.measured == 5
    log = (tmp_path / "goals.log").read_text()
    assert log.count("models are made") == 5  # anew behind each that broke, and behind the one that was profiled
    assert "its server was closed" in log
    assert capsys.readouterr().out.count("the last line") == 1


def test_a_session_ends_where_there_are_no_ceilings(broken: Measuring, tmp_path: Path) -> None:
    broken.command[-2] = "import sys; sys.exit('no device')"
    one = session.Session(CPU, tmp_path, str(tmp_path / "result.json"), float("inf"))
    one.pursue(["G1"], broken)
    report = json.loads((tmp_path / "result.json").read_text())
    assert "no device" in report["ceilings before"]
    assert (report["goals"], one.failed, one.measured) == ([], True, 0)


def test_the_measuring_process_ends_with_its_asker(broken: Measuring) -> None:
    """Also where the asking process is killed: the measuring one would hold the device's memory."""
    assert broken.ceilings(STARTS)[1] == "1980 MHz"
    process = broken.process.process  # type: ignore[union-attr]
    os.close(process.stdin.fileno())  # type: ignore[union-attr]
    assert process.wait(timeout=30.0) == 128 + signal.SIGTERM


def test_a_later_command_goes_on_where_the_report_ends(
    checked: Callable[[dict[str, Any]], session.Session], tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    first = checked({"row_codes": [WRONG], "fused_moe": Unfinished("it was not done in time", late=True)})
    timed: Any = Instantly()
    for name in ("G8", "G9", "G2"):
        first.record(first.pursued(name, CEILINGS, timed))
    later = session.Session(CPU, tmp_path, str(result), float("inf"))
    later.go_on(str(result))
    assert (later.whole, later.measured) == (["G8", "G9"], 2)  # G2 needs the wrong operation
    assert later.kernels == {"small": 9}
    missing = set(OPERATIONS) - set(later.checked.right)
    assert missing == {"row_codes", "fused_moe"}
    joined = later.checked.joined({operation: [RIGHT] for operation in missing})
    assert joined.whole
    assert set(joined.right) == set(OPERATIONS)


def test_a_first_command_has_no_report_to_go_on_from(tmp_path: Path) -> None:
    one = session.Session(CPU, tmp_path, str(tmp_path / "result.json"), float("inf"))
    one.go_on(str(tmp_path / "result.json"))
    one.go_on(None)
    assert (one.whole, one.checked.right) == ([], [])


def test_the_hour_has_every_goal_once() -> None:
    assert sorted(goals.HOUR) == sorted(goals.GOALS)


def test_the_page_says_what_was_found_and_what_is_owed(
    checked: Callable[[dict[str, Any]], session.Session], tmp_path: Path
) -> None:
    one = checked({"row_codes": [WRONG]})
    one.record(goals.judged("G9", {"ratio": 1.5}, {}))
    one.record(one.pursued("G2", CEILINGS, Instantly()))  # type: ignore[arg-type]
    text = page(json.loads((tmp_path / "result.json").read_text()))
    assert "| G9 | ratio | 1.500 | at most 1.15 | missed |" in text
    assert "- row_codes is wrong: two: 3 times" in text
    assert "- G2: row_codes is wrong (two: 3 times)" in text
    assert "Owed: G1, G3," in text


@pytest.mark.slow
def test_the_machine_and_the_built_in_model_are_looked_at_first(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    one = session.Session(CPU, tmp_path, str(result), float("inf"))
    one.inspect()
    report = json.loads(result.read_text())
    assert report["machine"]["launch"] == "triton does not launch kernels on cpu here"
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert report["tokens"] == {"kernel by kernel": "same", "by graphs": "same"}
