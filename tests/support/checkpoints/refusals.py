"""Checkpoints that must not be served: what is changed in the tiny model's folder, and why it was refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.engines.fixtures import SETTINGS

Change = Callable[[Path], object]


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(str(folder), **(SETTINGS | settings))


async def refused(folder: Path, **settings: Any) -> str:
    """Why the model is not served: one line, and no path of this machine in it."""
    with pytest.raises(ModelLoadError) as caught:
        async with engine_of(folder, **settings):
            raise AssertionError("it was served")
    message = caught.value.message
    assert "\n" not in message
    assert str(folder) not in message
    return message


def config(name: str = "config.json", **changes: Any) -> Change:
    """Other values in one of the folder's JSON files."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(values))

    return change


def content(text: bytes, name: str = "config.json") -> Change:
    return lambda folder: (folder / name).write_bytes(text)
