"""What is installed, and what importing it pulls in."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP = ("protocol", "kernels", "models", "actors", "server", "load_tests")


def folders() -> list[Path]:
    """Every folder below the packages that holds Python files."""
    return sorted({path.parent for top in TOP for path in (ROOT / top).rglob("*.py")})


def test_the_listed_packages_are_the_folders_on_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [".".join(("troupellm", *folder.relative_to(ROOT).parts)) for folder in folders()]
    assert sorted(listed) == sorted(["troupellm", *found])
    assert len(listed) == len(set(listed))


def test_init_files_are_there_and_empty() -> None:
    """An operation's is its public function, and no other says anything."""
    for folder in folders():
        init = folder / "__init__.py"
        operation = folder.parent == ROOT / "kernels"
        assert init.is_file()
        assert operation or not init.read_text(), f"{init.relative_to(ROOT)} is not empty"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import troupellm", ("msgspec", "anyio", "torch", "numpy")),
        ("import troupellm.kernels", ("msgspec", "anyio", "torch", "numpy")),
        ("from troupellm import SamplingParams", ("anyio", "torch")),
        ("from troupellm import Engine", ("torch", "transformers")),
        ("import troupellm.server.cli.main", ("torch", "transformers")),
    ],
)
def test_an_import_pulls_in_no_more_than_it_needs(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys\nprint(*[name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == []
