"""The installed packages, and the modules that importing them pulls in."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import troupellm

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


NOT_SHIPPED = {f"{folder}/README.md" for folder in TOP}


def test_what_is_no_python_file_is_listed_as_data_of_its_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        path.relative_to(ROOT).as_posix()
        for package, patterns in data.items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    others = {
        path.relative_to(ROOT).as_posix()
        for top in TOP
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert "kernels/cpp/attention.cpp" in others
    assert others - shipped == NOT_SHIPPED
    assert "py.typed" in shipped


def test_init_files_are_there_and_empty() -> None:
    """The one of a room of kernels/ is its public operation, and no other says anything."""
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


def test_every_error_can_be_caught_by_its_public_name() -> None:
    tree = ast.parse((ROOT / "protocol" / "errors.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    errors = {node.name for node in classes if ast.unparse(node.bases[0]) != "msgspec.Struct"}
    assert len(errors) > 10
    assert {name for name in errors if not issubclass(getattr(troupellm, name, object), Exception)} == set()


TRANSFORMERS_BACKEND = (
    "models/transformers_backend",
    "models/worker/check_transformers.py",
    "models/media/tower.py",
    "models/media/prepare_main.py",
)
FINDS_THE_PACKAGE = "troupellm.models.transformers_backend.installed"
"""The one module of the back end that other modules import at load: it finds the package without importing it."""
TRANSFORMERS_INSIDE_A_FUNCTION = {"models/tokenizer/tokenizer_files.py"}
"""It has old tokenizers converted."""


def test_transformers_is_imported_only_where_it_runs_a_model() -> None:
    """In functions of the back end, which itself is imported in functions alone, once a model was found to need it."""
    for package in ("protocol", "kernels", "models", "actors", "server"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            at_load = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            everywhere = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not any(names_transformers(node) for node in at_load), name
            if not name.startswith(TRANSFORMERS_BACKEND):
                others = [ast.unparse(node) for node in at_load if FINDS_THE_PACKAGE not in ast.unparse(node)]
                assert not any("transformers_backend" in text for text in others), name
                if name not in TRANSFORMERS_INSIDE_A_FUNCTION:
                    assert not any(names_transformers(node) for node in everywhere), name


def names_transformers(node: ast.Import | ast.ImportFrom) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return any(name.split(".")[0] == "transformers" for name in names)
