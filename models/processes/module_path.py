"""The import path of this process, for a child process that runs the same code: `python -P` with it as PYTHONPATH.

Without `-P` a child would also import from the working directory, which may be the folder of a downloaded model.
"""

import os
import sys


def child_environment() -> dict[str, str]:
    """The environment of this process, with its import path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
