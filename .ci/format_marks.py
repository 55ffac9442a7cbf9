"""Count the marks `# fmt: skip` that stand elsewhere than on a table of data, print them, and fail above the limits.

A table of data is a list, tuple, set or dict, alone or as the only argument of a type such as `frozenset`, that an
assignment, a `return`, a loop or `pytest.mark.parametrize` holds. All of it is known before the program runs: literals,
names that the module itself binds, and calls of these with such arguments. A local name or a comprehension is not data.
"""

import ast
import builtins
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LIMITS = {"actors": 4, "kernels": 40, "models": 1}
"""Marks elsewhere that a top folder still has; a number may shrink and go, none may grow or come."""
ROOT = Path(__file__).resolve().parents[1]
DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
HOLDERS = {"frozenset", "tuple", "set", "dict", "MappingProxyType"}


def main() -> int:
    found = [(path.relative_to(ROOT), line) for path in tracked() for line in misplaced(path.read_text("utf-8"))]
    counts = Counter(path.parts[0] for path, _ in found)
    grown = {folder for folder, count in counts.items() if count > LIMITS.get(folder, 0)}
    shrunk = {folder: counts[folder] for folder, limit in LIMITS.items() if counts[folder] < limit}
    print(*(f"{path}:{line}: `# fmt: skip` on code" for path, line in found if path.parts[0]), sep="\n")
    print(f"{len(found)} marks `# fmt: skip` stand on code")
    if shrunk:
        print(f"fewer than LIMITS of .ci/format_marks.py allow, so write there: {shrunk}")
    return bool(grown or shrunk)


def tracked() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def misplaced(source: str) -> Iterator[int]:
    """The lines of marks that stand on code."""
    marks = [
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.string.startswith(("# fmt: skip", "# fmt: off"))
    ]
    if marks:
        tree = ast.parse(source)
        known = names_of_module(tree)
        tables = {node.end_lineno for node in held_tables(tree) if is_table(node, known)}
        yield from (line for line in marks if line not in tables)


def names_of_module(tree: ast.Module) -> set[str]:
    """The names that are bound before any function of the module runs, with those that are imported anywhere."""
    known = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known.update((name.asname or name.name).partition(".")[0] for name in node.names)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(statement.name)
        else:
            known.update(
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )
    return known


def held_tables(tree: ast.Module) -> Iterator[ast.expr]:
    """The expressions that may be tables, by the statement that holds them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return) and node.value is not None:
            yield node.value
        elif isinstance(node, ast.For):
            yield node.iter
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from (decorator for decorator in node.decorator_list if is_parametrize(decorator))


def is_parametrize(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize"


def is_table(node: ast.expr, known: set[str]) -> bool:
    if isinstance(node, ast.Call) and is_parametrize(node):
        return len(node.args) > 1 and is_data(node.args[1], known)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in HOLDERS and len(node.args) == 1 and not node.keywords:
        return is_table(node.args[0], known)
    return isinstance(node, DISPLAYS) and is_data(node, known)


def is_data(node: ast.expr, known: set[str]) -> bool:
    code = (ast.Lambda, ast.IfExp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Compare)
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    parts = list(ast.walk(node))
    return not any(isinstance(part, code + comprehensions) for part in parts) and all(
        part.id in known for part in parts if isinstance(part, ast.Name)
    )


if __name__ == "__main__":
    sys.exit(main())
