"""Imports torch beside a running event loop.

`import torch` blocks every other thread of the process, the host application's event loop included, for two reasons.
First, it maps several hundred megabytes while it holds the GIL. A foreign call releases the GIL, and a library that is
mapped already is not mapped again. Second, it makes about 200,000 objects, which the garbage collector walks several
times, 50 to 100 ms each. They are frozen while the process has an engine; afterwards the collector is as it was before.
"""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_NEVER = 2**31 - 1
_INTERPRETERS = 1000
"""Upper limit of the objects that the interpreter freezes itself: some hundreds from 3.12 on. A host freezes more."""


class Frozen:
    """Hides objects from the garbage collector for the engines of this process, until the last engine has ended.

    `gc.unfreeze` knows no owners: if the host freezes objects itself, before or meanwhile, all of them stay frozen.
    """

    def __init__(self) -> None:
        self.imported = False
        """True if torch was imported for an engine. A torch that the host imported for itself is left as it is."""
        self._lock = threading.Lock()
        self._engines = 0
        self._objects = 0
        """The number of frozen objects; 0 if the host froze some first, so that unfreezing is up to it."""

    def hold(self) -> None:
        """Freeze all objects that exist. Each call needs one call of `release`."""
        with self._lock:
            self._engines += 1
            if self._engines > 1:
                return
            untouched = gc.get_freeze_count() < _INTERPRETERS
            gc.freeze()
            self._objects = gc.get_freeze_count() if untouched else 0

    def release(self) -> None:
        """After the last call the collector sees everything again, unless more objects were frozen meanwhile."""
        with self._lock:
            self._engines -= 1
            if self._engines == 0 and self._objects and gc.get_freeze_count() <= self._objects:
                gc.unfreeze()


frozen = Frozen()


def import_beside(name: str) -> tuple[ModuleType, bool]:
    """Import a module that needs torch, on a thread other than the event loop's.

    Returns:
        the module, and whether `frozen` holds it, to be released when it is not used any more.
    """
    if "torch" in sys.modules and not frozen.imported:
        return import_module(name), False
    frozen.imported = True
    preload_torch()
    with _no_full_collection():
        module = import_module(name)
        frozen.hold()
    return module, True


def preload_torch() -> None:
    """Map torch's largest library without holding the interpreter. Does nothing where it cannot help."""
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    if library.exists():
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
        dlopen(os.fsencode(library), os.RTLD_NOW)


@contextmanager
def _no_full_collection() -> Iterator[None]:
    """Collect young objects only.

    Modules are never garbage; unless they are frozen inside the block, the next full collection makes up for every one
    left out here.
    """
    before = gc.get_threshold()
    held = (before[0], before[1], _NEVER)
    gc.set_threshold(*held)
    try:
        yield
    finally:
        if gc.get_threshold() == held:  # otherwise the host has set its own meanwhile
            gc.set_threshold(*before)
