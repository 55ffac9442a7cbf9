"""No flag is taken by its beginning: a typing error would pass, and a later flag would change what a command means."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAKERS = ("ArgumentParser", "add_parser")


def parsers() -> list[tuple[str, ast.Call]]:
    """Every place that makes one."""
    files = [
        path
        for package in ("models", "server", "load_tests", "training", "plugins")
        for path in (ROOT / package).rglob("*.py")
    ]
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS
    ]


def test_every_parser_wants_its_flags_whole() -> None:
    found = parsers()
    assert len(found) > 20
    whole = "allow_abbrev=False"
    assert [name for name, call in found if whole not in map(ast.unparse, call.keywords)] == []
