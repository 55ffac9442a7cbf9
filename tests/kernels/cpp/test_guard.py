"""`TROUPE_GUARD=1`: guard bytes around what compiled code writes to tell which function left which memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from troupellm.kernels.cpp import build
from troupellm.tests.support.engines.inside import compiler_path
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code

SOURCE = """
#include "memory.h"
#include "refusal.h"

extern "C" const troupe::Refusal* leaves_buffer(int64_t place) {
    static thread_local troupe::Memory<float> memory{"sums"};
    memory.grow(100);
    memory.grow(10);
    memory[place] = 1.0f;
    return nullptr;
}

extern "C" const troupe::Refusal* leaves_argument(float* out, int64_t place) {
    out[place] = 1.0f;
    return nullptr;
}
"""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    needs_compiled_code()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    source, target = folder / "small.cpp", folder / "small.so"
    source.write_text(SOURCE)
    compiler = compiler_path()
    assert compiler is not None
    command = [
        compiler,
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{build.FOLDER}",
        str(source),
        str(build.FOLDER / "memory.cpp"),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)
    return target


def guarded(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TROUPE_GUARD": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


# Each call has a thread of its own, and a buffer lives as long as its thread. After a report the guard stays broken.
CALLS = """
import concurrent.futures, sys
from troupellm.kernels.cpp import Library; from troupellm.kernels.cpp import guard

library = Library(sys.argv[1])
out = guard.empty("out", 3, 4)
leaves_buffer, leaves_argument = library.function("leaves_buffer", "i"), library.function("leaves_argument", "pi")

def told(function, *given):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return str(thread.submit(function, *given).exception())

print("argument", 0, told(leaves_argument, out.data_ptr(), 0))
print("argument", 11, told(leaves_argument, out.data_ptr(), 11))
behind = guard.empty("behind", 3, 4)
print("argument", 12, told(leaves_argument, behind.data_ptr(), 12))
print("argument", -16, told(leaves_argument, out.data_ptr(), -16))
for place in (0, 9, -16, -1, 10, 25):
    print("buffer", place, told(leaves_buffer, place))
"""


def test_a_write_outside_of_memory_names_the_function_and_the_memory(library: Path) -> None:
    done = guarded(CALLS, str(library))
    assert done.stdout.splitlines() == [
        "argument 0 None",
        "argument 11 None",
        "argument 12 leaves_argument wrote outside of its argument behind",
        "argument -16 leaves_argument wrote outside of its argument out",
        "buffer 0 None",
        "buffer 9 None",
        *(f"buffer {place} leaves_buffer wrote outside of its buffer sums" for place in (-16, -1, 10, 25)),
    ], done.stderr


def test_decoder_layers_stay_in_their_memory_where_more_rows_are_kept_than_there_are() -> None:
    done = guarded(
        "import numpy as np\n"
        "from troupellm.tests.support.kernels.random_decoders import DECODERS\n"
        "from troupellm.kernels.cpp import guard\n"
        "assert guard.ON\n"
        "DECODERS['decoder_layers'](np.random.default_rng(2), 40)\n"
    )
    assert done.returncode == 0, done.stderr
