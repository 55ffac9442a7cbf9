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
