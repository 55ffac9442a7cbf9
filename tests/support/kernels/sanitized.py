"""Runs tests on compiled code built with AddressSanitizer and UBSan: `python sanitized.py [arguments of pytest]`.

A first report ends the run with its text. Without arguments these are the tests of the kernels, those that compare the
compiled path with transformers, and 2,000 random calls of every compiled function.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RUNTIMES = ("libasan.so", "libstdc++.so.6")
"""In this order: what takes the place of malloc comes first, and it looks for C++'s exceptions when it starts."""
TESTS = (
    "tests/kernels", "--ignore=tests/kernels/triton", "--ignore=tests/kernels/cpp/test_native.py",
    "tests/models/layers/test_decoder_layers.py", "tests/models/runner/test_compiled_decode.py",
    "tests/parity/test_families.py",
    "-m", "not slow",
)  # fmt: skip
"""All that calls compiled code; not what builds it again."""
CALLS = "2000"


def runtimes() -> list[str]:
    """Where the runtimes lie that the compiler links to; those that are not there are missing."""
    found = []
    for name in RUNTIMES:
        done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        if Path(done.stdout.strip()).is_absolute():
            found.append(done.stdout.strip())
    return found


def environment() -> dict[str, str]:
    """Of a process whose compiled code reports."""
    settings = {
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_WAIT_POLICY": "passive",
        "TROUPE_NATIVE": "asan", "LD_PRELOAD": ":".join(runtimes()),
    }  # fmt: skip
    return {**os.environ, **settings}


def build() -> None:
    """Compile without the runtimes: compilers need a multiple of their memory with them."""
    code = "from troupellm.kernels.cpp import build\nassert build.library() is not None"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TROUPE_NATIVE": "asan"}, check=True)


def main(arguments: list[str]) -> int:
    """
    Returns:
        pytest's exit status.
    """
    if len(runtimes()) < len(RUNTIMES):
        sys.exit("the compiler has no libasan.so")
    build()
    settings = {"TROUPE_RANDOM_CALLS": CALLS, **environment()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
