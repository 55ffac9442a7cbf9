"""Runs test files, each in a process of its own: `python forked.py FILE...`, then pytest's arguments after `--`.

What is slow to import is imported once, by the parent, before it forks. A file whose process dies (the interpreter
follows a wrong pointer) fails alone. Prints one JSON object per file: its name, its exit status and what it printed.
"""

import json
import os
import sys
import tempfile

import pytest
import torch
import triton.language
from torch.nn import functional  # noqa: F401


def run(path: str, arguments: list[str]) -> dict[str, str | int]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            # Schemathesis takes seconds to import, in every child; no check needs it.
            without = ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
            code = pytest.main(["-q", "-x", *without, *arguments, path])
            sys.stdout.flush()
            os._exit(int(code))
        _, status = os.waitpid(child, 0)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    return {"file": path, "status": os.waitstatus_to_exitcode(status), "output": printed}


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert triton.language is not None
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    for path in sys.argv[1:split]:
        print(json.dumps(run(path, sys.argv[split + 1 :])), flush=True)
