"""Importing torch beside an event loop, each time in a process that has not done so yet."""

import subprocess
import sys

import pytest

SCRIPT = """
import gc
full = []
gc.callbacks.append(lambda phase, info: full.append(1) if phase == "start" and info["generation"] == 2 else None)
gc.set_threshold(*{thresholds})
{before}
from troupellm.models.preload import import_beside
del full[:]
module = import_beside("troupellm.models.worker")
assert module.__name__ == "troupellm.models.worker" and module.ModelWorker
print(len(full), gc.get_threshold(), gc.get_freeze_count() > 50_000)
"""


@pytest.mark.parametrize(
    ("before", "frozen"), [("", True), pytest.param("import torch", False, marks=pytest.mark.slow)]
)
def test_no_full_collection_meets_the_import_and_none_makes_up_for_it(before: str, frozen: bool) -> None:
    script = SCRIPT.format(thresholds=(700, 10, 7), before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert not done.stderr
    collections, rest = done.stdout.split(" ", 1)
    assert rest.strip() == f"(700, 10, 7) {frozen}"
    if frozen:
        assert collections == "0"
