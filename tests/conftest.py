"""Backends of the async tests. Needs pytest only: kernel tests run where nothing else is installed."""

import gc
from collections.abc import Generator
from contextlib import suppress

import pytest

with suppress(ImportError):  # before anything is frozen: it looks for who refers to trio's random numbers
    import hypothesis  # noqa: F401

_ASYNCIO = pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio")
_UVLOOP = pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")
_TRIO = pytest.param(("trio", {}), id="trio")


@pytest.fixture(params=[_ASYNCIO, _UVLOOP])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Both event loops that we serve on."""
    return request.param


@pytest.fixture(params=[_ASYNCIO, _UVLOOP, _TRIO])
def any_backend(request: pytest.FixtureRequest) -> object:
    """For what the simulator runs too; a module's own `anyio_backend` fixture returns it."""
    return request.param


LONG = {"faults", "parity", "api", "models", "load_tests", "simulation"}
"""Folders with files that take many seconds. Those of the others take few, and fill up what is left at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that may take long begin first: side by side with others, they would else end alone."""
    longest: dict[object, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), marker.args[0] if marker else 0.0)
    items.sort(key=lambda item: (-longest[item.path], LONG.isdisjoint(item.nodeid.partition("::")[0].split("/"))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep imported and collected objects: no full garbage collection walks them, now or in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
