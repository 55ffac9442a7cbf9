"""No cached function returns a tensor.

A tensor keeps the mode (fake, inference, a default device) under which its first caller made it, and every later caller
in the process gets it. A cached table is a NumPy array.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("actors", "kernels", "models", "protocol", "server")


def test_no_cached_function_returns_a_tensor() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and _cached(node)
        and node.returns
        and "Tensor" in ast.unparse(node.returns)
    ]
    assert not found


def _cached(node: ast.FunctionDef) -> bool:
    names = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
    return not names.isdisjoint({"cache", "lru_cache", "functools.cache", "functools.lru_cache"})
