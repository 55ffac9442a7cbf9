"""Plants each fault of the table in a copy of the repository and runs the quick tests of its room: `make mutants`.

The checkout itself is never changed. A fault counts as killed if a test fails or the tests take too long. Prints each
result by name, and the survivors again at the end.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from troupellm.tests.mutants.mutant import Mutant
from troupellm.tests.mutants.table import MUTANTS

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = "troupellm"
TIMEOUT_SECONDS: Final = 180.0
LEAST_SHARE: Final = 57 / 60
"""Of the planted faults, that must be killed."""
_PASSED, _FAILED = 0, 1
"""Exit codes of pytest; all others mean that the table is wrong."""


class Copy:
    """The repository in a folder of its own, which processes import instead of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / PACKAGE
        for name in _files():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        self._environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}

    def test(self, tests: Sequence[str], *options: str, seconds: float = TIMEOUT_SECONDS) -> tuple[int | None, str]:
        """The exit code of the tests, None if they took too long; and the end of their output."""
        paths = [f"tests/{name}" for name in tests]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-m", "not slow", "-p", "no:cacheprovider"]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [*command, *options, *paths],
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return code, "\n".join(output.read().splitlines()[-12:])

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The copy has the fault inside the block."""
        path = self.root / mutant.file
        right = path.read_text(encoding="utf-8")
        if right.count(mutant.right) != 1:
            raise SystemExit(f"{mutant.file} does not have the text of {mutant.fault!r} exactly once")
        try:
            self._write(path, right.replace(mutant.right, mutant.wrong))
            yield
        finally:
            self._write(path, right)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        Path(cache_from_source(str(path))).unlink(missing_ok=True)  # compiled code of the same second would stay valid


def _files() -> list[str]:
    """The files that git tracks or would add, and the compiled kernels, which take minutes to build."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    built = [path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels/cpp/__pycache__").glob("*.so")]
    return [name for name in (*names, *built) if (ROOT / name).is_file()]


def survives(copy: Copy, mutant: Mutant) -> bool:
    with copy.planted(mutant):
        code, output = copy.test(mutant.tests.split(), "-x")
    if code not in (_PASSED, _FAILED, None):
        raise SystemExit(f"the tests of {mutant.fault!r} could not run:\n{output}")
    return code == _PASSED


def search(mutants: Sequence[Mutant], folder: Path, jobs: int) -> list[Mutant]:
    """The faults that no test notices."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(jobs):
        copies.put(Copy(folder / str(number)))
    everything = sorted({name for mutant in mutants for name in mutant.tests.split()})
    first = copies.get()
    spread = ("-n", str(jobs), "--dist", "loadfile") if jobs > 1 else ()
    code, output = first.test(everything, *spread, seconds=TIMEOUT_SECONDS * len(everything))
    copies.put(first)
    if code != _PASSED:
        raise SystemExit(f"the tests fail without a fault:\n{output}")

    def tried(mutant: Mutant) -> bool:
        copy = copies.get()
        try:
            survived = survives(copy, mutant)
        finally:
            copies.put(copy)
        print(f"{'SURVIVED' if survived else 'killed'}  {mutant.file}: {mutant.fault}", flush=True)
        return survived

    with ThreadPoolExecutor(jobs) as pool:
        return [mutant for mutant, survived in zip(mutants, pool.map(tried, mutants), strict=True) if survived]


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of files or faults; none: all of the table")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at once")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the copies are removed
    chosen = [
        one for one in MUTANTS if not given.names or any(name in f"{one.file}: {one.fault}" for name in given.names)
    ]
    with tempfile.TemporaryDirectory(prefix="troupellm-mutants-") as folder:
        survivors = search(chosen, Path(folder), given.jobs)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted faults are killed")
    for mutant in survivors:
        print(f"survived: {mutant.fault} ({mutant.file})")
    return len(chosen) - len(survivors) < LEAST_SHARE * len(chosen)


if __name__ == "__main__":
    sys.exit(main())
