"""Importing torch beside an event loop, each time in a process that has not done so yet."""

import subprocess
import sys
from pathlib import Path

import pytest

from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

SCRIPT = """
import gc
full = []
gc.callbacks.append(lambda phase, info: full.append(1) if phase == "start" and info["generation"] == 2 else None)
gc.set_threshold(*{thresholds})
{before}
from troupellm.models.processes.preload_torch import import_beside
del full[:]
module, held = import_beside("troupellm.models.worker.worker")
assert held is {held}
assert module.__name__ == "troupellm.models.worker.worker" and module.ModelWorker
print(len(full), gc.get_threshold(), gc.get_freeze_count() > 50_000)
"""


@pytest.mark.parametrize(
    ("before", "frozen"), [("", True), pytest.param("import torch", False, marks=pytest.mark.slow)]
)
def test_no_full_collection_meets_the_import_and_none_makes_up_for_it(before: str, frozen: bool) -> None:
    script = SCRIPT.format(thresholds=(700, 10, 7), before=before, held=frozen)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert not done.stderr
    collections, rest = done.stdout.split(" ", 1)
    assert rest.strip() == f"(700, 10, 7) {frozen}"
    if frozen:
        assert collections == "0"


HANDING_OVER = """
import gc
callbacks = set()
gc.callbacks.append(lambda phase, info: callbacks.add(len(gc.callbacks)))
from troupellm.models.processes.preload_torch import import_beside
callbacks.clear()
import_beside("troupellm.models.worker.worker")
print(callbacks == {2}, len(gc.callbacks))
"""


def test_collections_run_python_code_while_torch_is_imported_and_not_afterwards() -> None:
    """Else the initialization of torch's extension, one foreign call of 40 ms, keeps the interpreter to itself."""
    done = subprocess.run([sys.executable, "-c", HANDING_OVER], capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.stdout.strip()) == ("", "True 1")


HOLDING = """
import gc
from troupellm.models.processes.preload_torch import Frozen
frozen = Frozen()
counts = []
def do(*calls):
    for call in calls:
        call()
    counts.append(gc.get_freeze_count() > 0)
{calls}
print(*counts)
"""


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("do(frozen.hold); do(frozen.hold); do(frozen.release); do(frozen.release)", "True True True False"),
        ("do(frozen.hold, frozen.release); do(frozen.hold); do(frozen.release)", "False True False"),
        ("do(gc.freeze); do(frozen.hold); do(frozen.release)", "True True True"),
        ("do(frozen.hold); more = [[] for _ in range(50_000)]; do(gc.freeze, frozen.release)", "True True"),
    ],
    ids=["two engines", "one after the other", "the host froze before", "the host froze meanwhile"],
)
def test_the_collector_is_the_hosts_again_after_the_last_engine(calls: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLDING.format(calls=calls)], capture_output=True, text=True, timeout=60
    )
    assert (done.stderr, done.stdout.strip()) == ("", expected)


COUNTING = """
import gc
counted, count = [], gc.get_freeze_count
gc.get_freeze_count = lambda: counted.append(count()) or counted[-1]
from troupellm.models.processes.preload_torch import Frozen
frozen, objects = Frozen(), [[] for _ in range(50_000)]
for _ in range(2):
    frozen.hold()
    held = count() > 50_000
    frozen.release()
print(held, count(), bool(counted), max(counted) < 1000)
"""


def test_an_engine_never_counts_the_objects_that_it_freezes() -> None:
    """They are counted one by one with the interpreter held: torch's take 25 ms, at each start and each end."""
    done = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout.strip()) == ("", "True 0 True True")


ENGINES = """
import gc, sys
import anyio, troupellm

async def main():
    settings = {"kv_cache_memory_bytes": 2**20, "num_threads": 1, "device": "cpu"}
    for _ in range(2):
        async with troupellm.Engine(sys.argv[1], **settings) as engine:
            await engine.generate("x", max_tokens=1)
            print(gc.get_freeze_count() > 50_000, gc.get_threshold())
        print(gc.get_freeze_count(), gc.get_threshold())

gc.set_threshold(700, 10, 7)
anyio.run(main)
"""


@pytest.mark.slow
def test_leaving_an_engine_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    """Once what a host had made before its first engine was never collected again."""
    folder = write_tiny_model(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-c", ENGINES, str(folder)], capture_output=True, text=True, timeout=110, check=True
    )
    assert done.stdout.splitlines() == ["True (700, 10, 7)", "0 (700, 10, 7)"] * 2
