"""Imports torch beside a running event loop.

`import torch` blocks every other thread of the process, the host application's event loop included, for three reasons.
First, it maps several hundred megabytes while it holds the GIL. A foreign call releases the GIL, and a library that is
mapped already is not mapped again. Second, it makes about 200,000 objects, which the garbage collector walks several
times, 50 to 100 ms each. They are frozen while the process has an engine; afterwards the collector is as it was before.
Third, the initialization of its extension is one foreign call of 40 ms that holds the GIL. The GIL changes hands where
Python code runs, and each collection of young objects, of which the call makes dozens, runs the collector's callbacks.
"""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_NEVER = 2**31 - 1
_LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so")
_AGES = 3
"""Of the garbage collector's objects."""
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
        self._younger: list[None] | None = None
        """An object that is not frozen unless the host freezes objects after this class. None: the host froze some
        first, so that unfreezing is up to it."""

    def hold(self) -> None:
        """Freeze all objects that exist. Each call needs one call of `release`."""
        with self._lock:
            self._engines += 1
            if self._engines > 1:
                return
            untouched = gc.get_freeze_count() < _INTERPRETERS  # it counts them one by one: quick before, slow behind
            gc.freeze()
            self._younger = [] if untouched else None

    def release(self) -> None:
        """After the last call the collector sees everything again, unless more objects were frozen meanwhile."""
        with self._lock:
            self._engines -= 1
            if self._engines == 0 and self._younger is not None and _is_collected(self._younger):
                gc.unfreeze()


def _is_collected(wanted: list[None]) -> bool:
    """Whether the garbage collector sees an object. Looks at the objects that are not frozen, which are few beside
    those that are."""
    return any(one is wanted for age in range(_AGES) for one in gc.get_objects(age))


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
    with _no_full_collection(), _handing_over():
        module = import_module(name)
        frozen.hold()
    return module, True


def preload_torch() -> None:
    """Map torch's largest libraries without holding the interpreter. Does nothing where it cannot help."""
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name in _LIBRARIES:
        library = Path(spec.origin).parent / "lib" / name
        if library.exists():
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


@contextmanager
def _handing_over() -> Iterator[None]:
    """Let other threads run at each collection of young objects, also where foreign code makes them.

    From Python 3.12 on no collection runs inside foreign code, so that this has no effect there.
    """

    def run_python(_phase: str, _info: dict[str, int]) -> None:
        """The interpreter gives the GIL away, where another thread waits for it, as any function of Python begins."""

    gc.callbacks.append(run_python)
    try:
        yield
    finally:
        with suppress(ValueError):  # the host has emptied the list
            gc.callbacks.remove(run_python)
