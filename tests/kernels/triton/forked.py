"""Runs test files, each in a process of its own: `python forked.py FILE...`, then pytest's arguments after `--`.

The parent imports slow modules once, before it forks. A file whose process dies (the interpreter
follows a wrong pointer) fails alone. Prints one JSON object per file: its name, its exit status, what it printed and
which kernels it has run in the interpreter or compiled.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import triton.language
from torch.nn import functional  # noqa: F401
from triton.runtime.interpreter import GridExecutor

with suppress(ImportError):  # what plugins of pytest bring along, where they are installed
    import anyio._backends._asyncio
    import anyio.pytest_plugin  # noqa: F401
    import hypothesis  # noqa: F401

if "TRITON_INTERPRET" in os.environ:
    import torch.distributed.tensor  # `torch.testing.assert_close` imports it at its first call: two seconds per file

OPTIONS = (
    "-p", "no:cacheprovider",
    "-p", "no:schemathesis",  # takes seconds to import, and no check needs it
    "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning",  # by the parent
    "-W", "ignore:Conversion of an array:DeprecationWarning",  # that numpy 2 has for the interpreter of Triton 3.6
)  # fmt: skip
KERNELS = "kernels: "


def noting(function: Callable[..., Any], kernel: Callable[[Any], Any], names: set[str]) -> Callable[..., Any]:
    """The same function; the kernel that its first argument is for is noted."""

    def call(first: Any, *arguments: Any, **options: Any) -> Any:
        found = kernel(first)
        names.add(f"{found.__module__}.{found.__name__}")
        return function(first, *arguments, **options)

    return call


def check(path: str, arguments: list[str]) -> int:
    """Run one file in this process."""
    names: set[str] = set()
    GridExecutor.__call__ = noting(GridExecutor.__call__, lambda executor: executor.fn, names)
    triton.compile = noting(triton.compile, lambda source: source.fn.fn, names)
    code = pytest.main(["-q", "-x", *OPTIONS, *arguments, path])
    print(KERNELS + " ".join(sorted(names)))
    sys.stdout.flush()
    return int(code)


def run(path: str, arguments: list[str]) -> dict[str, str | int | list[str]]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os._exit(check(path, arguments))
        _, status = os.waitpid(child, 0)
        output.seek(0)
        printed, _, kernels = output.read().decode(errors="replace").rpartition(KERNELS)
    return {
        "file": path,
        "status": os.waitstatus_to_exitcode(status),
        "output": printed or kernels,
        "kernels": kernels.split() if printed else [],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert triton.language is not None
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    for path in sys.argv[1:split]:
        print(json.dumps(run(path, sys.argv[split + 1 :])), flush=True)
