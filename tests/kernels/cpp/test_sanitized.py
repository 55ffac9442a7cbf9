"""`make asan`: no access outside of memory and no undefined behaviour in all that calls compiled code."""

import subprocess
import sys
from pathlib import Path

import pytest

from troupellm.tests.support.environment.absence import absent
from troupellm.tests.support.kernels import sanitized
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_build_with_sanitizers_reports_nothing() -> None:
    needs_compiled_code()
    if len(sanitized.runtimes()) < len(sanitized.RUNTIMES):
        absent("libasan.so", "the compiler's package has it, libgcc-dev on Debian")
    program = Path(sanitized.__file__)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=3500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
