"""Texts that every machine with this Python has: English prose, code, and code that is mostly numbers."""

import inspect
from importlib import import_module
from types import ModuleType

CODE, NUMBERS = "argparse", "_pydecimal"


def texts() -> dict[str, str]:
    """By name; each of more than 50,000 characters."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    return {"prose": prose, "code": _source(CODE), "numbers": _source(NUMBERS)}


def _source(module: str) -> str:
    found: ModuleType = import_module(module)
    return inspect.getsource(found)
