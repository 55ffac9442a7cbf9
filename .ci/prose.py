"""Count the lines of prose with an indefinite subject, print them, and fail above the limit.

Prose is a comment or a docstring of a Python or C++ file, a string that an error is raised with, and the text of a
document. A subject is indefinite if it is one of `WORDS`, or if a statement begins with "What" or "Who".
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIMIT = 20
WORDS = re.compile(r"\b(?:whoever|whatever|whichever|nobody|somebody|whom)\b", re.IGNORECASE)
OPENING = re.compile(r"(?:^|(?<=[.:;!] ))\W*(?:What|Who)\b(?!\W*$)[^?]*$")
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    found = [line for path in tracked() for line in indefinite(path)]
    print(*found, sep="\n")
    print(f"{len(found)} lines of prose have an indefinite subject; at most {LIMIT} are allowed")
    return len(found) > LIMIT


def tracked() -> list[Path]:
    """The files that git tracks or would add, of the kinds that hold prose."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md", "*.h", "*.cpp"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).is_file() and name != ".ci/prose.py"]


def indefinite(path: Path) -> Iterator[str]:
    readers = {".py": python_prose, ".md": document_prose}
    for number, text in readers.get(path.suffix, cpp_prose)(path.read_text(encoding="utf-8")):
        plain = re.sub(r"`[^`]*`", "", text)
        if WORDS.search(plain) or OPENING.search(plain):
            yield f"{path.relative_to(ROOT)}:{number}: {text.strip()}"


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                yield number, lines[number - 1].strip().strip('"')
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def document_prose(source: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced:
            yield number, line.lstrip("-*# ")


def cpp_prose(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        _, mark, text = line.partition("//")
        if mark:
            yield number, text.strip()


if __name__ == "__main__":
    sys.exit(main())
