"""The packages of plugins/: installed with the test tools, found by their entry points, and listed in the documents."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plug_in_is_found_by_its_entry_points(folder: Path) -> None:
    settings: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["packages"] == [path.parent.name for path in folder.glob("*/__init__.py")]
    for group, points in settings["project"]["entry-points"].items():
        for name, value in points.items():
            (point,) = entry_points(group=group, name=name)
            assert point.value == value
            assert callable(point.load())


def test_every_plug_in_is_installed_by_make_and_listed() -> None:
    assert len(FOLDERS) > 1
    names = [f"plugins/{folder.name}" for folder in FOLDERS]
    assert f"PLUGINS := {' '.join(names)}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    table = (ROOT / "plugins" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}/`" in table for name in names)
