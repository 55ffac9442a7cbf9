"""Where tests replace something of a running program, read from their syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

_METHODS = {"setattr", "setitem", "delattr", "delitem"}


def patches_of(path: Path) -> Iterator[tuple[str, ast.expr | None]]:
    """The target of each patch of a file, and its replacement.

    `monkeypatch.setattr` and its like, `mock.patch`, `sys.modules[...] = ...`, and assignments to an attribute of an
    imported module or class. The name of a local object is that of the expression in the file.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {local: full for node in ast.walk(tree) for local, full in _imported(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=ast.Name(id=owner)), args=[target, *rest]) if (
                method in _METHODS and "patch" in owner
            ):
                yield _target(target, rest, names), rest[-1] if rest else None
            case ast.Call(func=ast.Attribute(attr="patch" | "object" | "dict"), args=[target, *rest]) if (
                "patch" in ast.unparse(node.func)
            ):
                yield _target(target, rest, names), rest[-1] if rest else None
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target], value=value):
                full = _full(target.value, names)
                if full.startswith("troupellm.") or full == "sys.modules":
                    last = target.attr if isinstance(target, ast.Attribute) else _text(target.slice)
                    yield f"{full}.{last}", value


def _target(target: ast.expr, rest: list[ast.expr], names: dict[str, str]) -> str:
    if isinstance(target, ast.Constant):
        return str(target.value)
    return f"{_full(target, names)}.{_text(rest[0])}" if rest else _full(target, names)


def _full(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name, from the root of its package where the file imports it."""
    root, dot, rest = ast.unparse(node).partition(".")
    return names.get(root, root) + dot + rest


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import(names=found):
            for alias in found:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        case ast.ImportFrom(module=str(module), names=found):
            for alias in found:
                yield alias.asname or alias.name, f"{module}.{alias.name}"
