"""Importing torch beside an event loop that goes on.

`import torch` stops every other thread of the process, the event loop of the host application among them, for two
reasons. It maps several hundred megabytes while it holds the GIL: a foreign call releases the GIL, and what is mapped
already is not mapped again. And it makes some two hundred thousand objects, so that the garbage collector walks over
all of them several times, 50 to 100 ms each.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_NEVER = 2**31 - 1


def import_beside(name: str) -> ModuleType:
    """Import a module that needs torch, on a thread other than the event loop's."""
    if "torch" in sys.modules:
        return import_module(name)
    preload_torch()
    with _no_full_collection():
        return import_module(name)


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
    """Collect young objects only, and at the end take all that there are out of the collector's sight.

    Modules are never garbage; unless they are frozen, the next full collection makes up for every one left out here.
    """
    before = gc.get_threshold()
    held = (before[0], before[1], _NEVER)
    gc.set_threshold(*held)
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold() == held:  # otherwise the host has set its own meanwhile
            gc.set_threshold(*before)
