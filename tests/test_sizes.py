"""Files and functions stay short enough to read."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES = 400
FUNCTION_LINES = 80
KERNEL_LINES = 120
"""A kernel's body is one function."""
FAMILY_LINES = 150
"""Of a file that describes a family of decoders over the layers that all share."""

LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
"""Files and functions over the cap, with their lines. Entries may shrink and go; none may grow or come."""

PACKAGES = ("protocol", "kernels", "models", "actors", "server", "load_tests", "training", "plugins", "tests")
FILES = sorted([ROOT / "__init__.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))])
NATIVE = sorted(path for kind in ("*.cpp", "*.h") for path in (ROOT / "kernels" / "cpp").glob(kind))


def over_the_cap(sizes: dict[str, int], cap: int, allowed: dict[str, int]) -> dict[str, int]:
    return {name: lines for name, lines in sizes.items() if lines > max(cap, allowed.get(name, 0))}


def file_sizes() -> dict[str, int]:
    return {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (*FILES, *NATIVE)
    }


@cache
def function_sizes(*, kernels: bool) -> dict[str, int]:
    sizes = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("kernels/") != kernels:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                sizes[f"{name}:{node.name}"] = node.end_lineno - node.lineno + 1
    return sizes


def test_no_file_is_over_the_cap() -> None:
    assert NATIVE
    assert not over_the_cap(file_sizes(), FILE_LINES, LONG_FILES)


def test_no_family_is_over_the_cap() -> None:
    families = {name: lines for name, lines in file_sizes().items() if is_family(name)}
    assert len(families) >= 16
    assert not over_the_cap(families, FAMILY_LINES, {})


def is_family(name: str) -> bool:
    """Whether a file of models/families/ says which architectures it describes."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return (
        Path(name).parent == Path("models/families") and re.search(r"^ARCHITECTURES\b", text, re.MULTILINE) is not None
    )


def test_no_function_is_over_the_cap() -> None:
    assert not over_the_cap(function_sizes(kernels=False), FUNCTION_LINES, LONG_FUNCTIONS)
    assert not over_the_cap(function_sizes(kernels=True), KERNEL_LINES, LONG_FUNCTIONS)


def test_the_lists_of_long_files_and_functions_name_only_long_ones() -> None:
    sizes = file_sizes()
    functions = function_sizes(kernels=False) | function_sizes(kernels=True)
    assert all(sizes.get(name, 0) == lines > FILE_LINES for name, lines in LONG_FILES.items())
    assert all(functions.get(name, 0) == lines > FUNCTION_LINES for name, lines in LONG_FUNCTIONS.items())
