"""`python -O` leaves assert statements out, so none of them may be the check that refuses input from outside.

They may tell the type checker what the lines before have made sure of, and state invariants in methods that
are called for nothing else.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protocol", "kernels", "models", "actors", "server", "plugins")
FILES = sorted([ROOT / "__init__.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))])
DECODED = frozenset({"Mapping", "Sequence", "dict", "list", "tuple", "str", "bytes", "int", "float", "bool", "object"})
"""The types to which JSON and other input from outside is decoded."""
INVARIANTS = "assert_"
"""How the names of methods begin that state them."""


def guards(tree: ast.AST) -> Iterator[ast.Assert]:
    """Statements that do more than they may."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(INVARIANTS):
            continue
        if isinstance(node, ast.Assert) and not narrows(node.test):
            yield node
        yield from guards(node)


def narrows(test: ast.expr) -> bool:
    """Something is there, or is of one of our own types."""
    match test:
        case ast.Compare(left=ast.Name() | ast.Attribute(), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name() | ast.Attribute(), kinds]):
            return not DECODED & {node.id for node in ast.walk(kinds) if isinstance(node, ast.Name)}
    return False


def test_no_assert_statement_guards_input() -> None:
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{guard.lineno}: {ast.unparse(guard)}"
        for path in FILES
        for guard in guards(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_what_is_said_to_each_other_needs_no_assert_statement_at_all() -> None:
    for path in (ROOT / "protocol").rglob("*.py"):
        statements = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Assert)]
        assert not statements, path


@pytest.mark.parametrize(
    ("statement", "count"),
    [
        ("assert size > 0", 1),
        ("assert isinstance(body, dict)", 1),
        ("assert isinstance(body['x'], Request)", 1),
        ("assert isinstance(kind, Request | str)", 1),
        ("assert body.get('x') is not None", 1),
        ("assert a is not None and b > 0", 1),
        ("def check(body):\n    assert body", 1),
        ("assert self._worker is not None", 0),
        ("assert isinstance(decoder, Decoder)", 0),
        ("def assert_invariants(self):\n    assert self.free >= 0", 0),
    ],
)
def test_guards_are_told_from_other_asserts(statement: str, count: int) -> None:
    assert len(list(guards(ast.parse(statement)))) == count
