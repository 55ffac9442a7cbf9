"""Loading torch's largest library without holding the interpreter.

`import torch` maps several hundred megabytes while it holds the GIL, which stops every other thread, the event loop of
the host application among them, for about half a second. A foreign call releases the GIL, and what is mapped already is
not mapped again.
"""

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path


def preload_torch() -> None:
    """Call on the thread that is about to import torch. Does nothing where it cannot help."""
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
