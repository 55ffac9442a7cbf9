"""One tiny engine per test, on real sockets."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from troupellm.actors.engine import Engine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def tiny_engine(checkpoint: Path) -> Callable[..., AbstractAsyncContextManager[Engine]]:
    """Makes an engine of the tiny model; further settings may be given."""
    settings = {"kv_cache_memory_bytes": 4 * 2**20, "device": "cpu", "num_threads": 1, "flush_interval": 0.0}
    return partial(_make, str(checkpoint), settings)


def _make(model: str, settings: dict[str, object], **overrides: object) -> Engine:
    return Engine(model, **(settings | overrides))


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})
