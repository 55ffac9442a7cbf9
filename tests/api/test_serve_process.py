"""`troupellm serve` as a process: exit codes. How it drains is in tests/faults/test_I_lifecycle.py."""

import sys

import anyio
import pytest

from troupellm.tests.support.servers.processes import START_SECONDS

pytestmark = pytest.mark.anyio


async def test_model_that_cannot_be_loaded_is_exit_code_3(tmp_path):
    command = [sys.executable, "-m", "troupellm.server.cli.main", "serve", str(tmp_path), "--port", "0"]
    with anyio.fail_after(START_SECONDS):
        result = await anyio.run_process(command, check=False)
    assert result.returncode == 3
    assert b"Traceback" not in result.stderr
    assert b"troupellm: " in result.stderr
