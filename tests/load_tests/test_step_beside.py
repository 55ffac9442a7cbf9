"""`bench step --beside`: what its table says, and the busy programs that it starts."""

import json
from pathlib import Path

import psutil
import pytest

from troupellm.load_tests.step.beside import Cell, busy_programs, table
from troupellm.server.cli.main import main


def test_the_table_compares_with_one_thread_and_with_the_quiet_machine() -> None:
    cells = [
        Cell("decode 1", 0, 200.0, 150.0),
        Cell("decode 1", 1, 80.0, 80.0),
        Cell("decode 1", 4, 30.0, 40.0),
        Cell("prompt 1000", 1, 95.0, 100.0),
    ]
    lines = table(cells).splitlines()[1:]
    assert [line.split()[-2:] for line in lines[:1]] == [["1.33", "1.00"]]
    assert lines[1].endswith("0.40  below the bar"), "0.45 of the quiet machine"
    assert lines[2].endswith("0.15  below the bar"), "0.9 of one thread"
    assert lines[3].split()[-2:] == ["0.95", "-"]


def test_busy_programs_end_with_their_block() -> None:
    own = psutil.Process()
    before = {child.pid for child in own.children()}
    with busy_programs(2):
        started = {child.pid for child in own.children()} - before
        assert len(started) == 2
    assert not {child.pid for child in own.children()} & started


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--batch-invariant",)])
def test_bench_step_beside_in_small(flags: tuple[str, ...], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    argv = ("--model", "tiny", "--beside", "0", "1", "--batches", "2", "--steps", "4", "--repeats", "1", *flags)
    assert main(["bench", "step", *argv, "--result-json", str(result)]) == 0
    cells = json.loads(result.read_text())
    assert [(cell["beside"], cell["kind"]) for cell in cells] == [
        (0, "decode 2"),
        (0, "prompt 1000"),
        (1, "decode 2"),
        (1, "prompt 1000"),
    ]
    assert all(cell["all_threads"] > 0 and cell["one_thread"] > 0 for cell in cells)
