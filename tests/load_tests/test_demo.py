"""`make demo`: two answers of the built-in model through the official client, from a server of its own."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_demo_shows_two_answers_and_stops() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "troupellm.load_tests.demo"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\nchat: Tell me a story about a fox.\n" in done.stdout
    assert "\ncompletion: Once upon a time ...\n" in done.stdout
    assert len(re.findall(r"^\[TTFT \d+ ms, \d+ tokens, \d+ tokens/s\]$", done.stdout, re.MULTILINE)) == 2
