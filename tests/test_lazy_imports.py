"""A source file imports each submodule that it uses, and no public name depends on an import elsewhere.

huggingface_hub loads its submodules at their first use: `huggingface_hub.constants` without an import of it worked in
tests, which had imported it, and in no fresh process.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import troupellm
from troupellm.tests.support.environment.module_chains import Use, failures, is_submodule, uses_of

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "transformers", "triton"}
"""Packages that take seconds to import."""
LAYERS = ("protocol", "kernels", "models", "actors", "server", "load_tests", "training")


def product_files() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def uses() -> dict[str, list[Use]]:
    """The uses of submodules of each package that is not ours."""
    found: dict[str, list[Use]] = defaultdict(list)
    for path in product_files():
        for use in uses_of(path, path.relative_to(ROOT).as_posix()):
            if use.chain[0] != "troupellm" and is_submodule(*use.chain[:2]):
                found[use.chain[0]].append(use)
    return found


def missing(package: str, found: list[Use]) -> list[str]:
    """Places whose chain is there neither with the package alone, nor with what the file imports of it."""
    unknown = failures([package], {use.chain for use in found})
    chains: dict[frozenset[str], list[Use]] = defaultdict(list)
    for use in found:
        if use.chain in unknown:
            chains[use.imported].append(use)
    places = []
    for imported, used in chains.items():
        failed = failures([package, *sorted(imported)], {use.chain for use in used})
        places += [f"{use.place}: {'.'.join(use.chain)}" for use in used if use.chain in failed]
    return places


def test_every_submodule_that_a_file_uses_is_imported_by_that_file() -> None:
    found = uses()
    assert {"huggingface_hub", "importlib", "jinja2", "numpy", "torch"} <= found.keys()
    assert not [place for package in sorted(found.keys() - HEAVY) for place in missing(package, found[package])]


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(HEAVY))
def test_every_submodule_of_a_heavy_package_is_imported_by_the_file_that_uses_it(package: str) -> None:
    assert not missing(package, uses()[package])


def test_a_submodule_that_only_another_lookup_loads_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import huggingface_hub\nimport json, importlib.util\n"
        "def late(json):\n    import huggingface_hub.errors\n"
        "    return huggingface_hub.HfApi, huggingface_hub.constants, json.nothing, importlib.util.find_spec\n"
    )
    found: dict[str, list[Use]] = defaultdict(list)
    for use in uses_of(file, "module.py"):
        found[use.chain[0]].append(use)
    places = [place for package, used in found.items() for place in missing(package, used)]
    assert places == ["module.py:5: huggingface_hub.constants"]


def imported_late() -> set[str]:
    """The modules of ours that functions import."""
    return {
        node.module
        for path in product_files()
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("troupellm.")
    }


_FIRST = """
import os, sys, torch
from importlib import import_module
for name in sys.argv[1:]:
    if not os.fork():
        import_module(name)
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_module_that_a_function_imports_can_be_the_first_one() -> None:
    names = sorted(imported_late())
    assert len(names) > 50
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _FIRST, *names], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


_PUBLIC = """
import os, sys, torch, troupellm
for name in sys.argv[1:]:
    if not os.fork():
        getattr(troupellm, name)
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""


def test_every_public_name_is_found_first() -> None:
    assert {*troupellm._HOMES, "__version__"} == {*troupellm.__all__}
    names = sorted({home: name for name, home in troupellm._HOMES.items()}.values())  # one of each module
    assert len(names) > 10
    done = subprocess.run(
        [sys.executable, "-c", _PUBLIC, *names], check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "", done.stderr
