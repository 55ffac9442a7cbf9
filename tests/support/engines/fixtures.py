"""Fixtures that make tiny engines; the conftest files of the suites that serve import them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

SETTINGS = {
    "kv_cache_memory_bytes": 4 * 2**20,
    "device": "cpu",
    "num_threads": 1,
    "flush_interval": 0.0,
    "max_num_prefill_tokens": 512,
}
"""With a fixed number of prompt tokens in a step, which else is measured at each start."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def tiny_engine(checkpoint: Path) -> Callable[..., Engine]:
    """Makes an engine of the tiny model, not yet entered; settings may be given."""
    return partial(_make, str(checkpoint))


@pytest.fixture
def builtin_engine() -> Callable[..., Engine]:
    """Makes an engine of the model that is built in, not yet entered."""
    return partial(_make, None)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


def _make(model: str | None, **overrides: object) -> Engine:
    return Engine(model, **(SETTINGS | overrides))
