"""The check of `make check` for `# fmt: skip`: it stays on tables of data and is refused on code."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / ".ci" / "format_marks.py"


@pytest.fixture(scope="module")
def check() -> Any:
    spec = importlib.util.spec_from_file_location("format_marks", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "source",
    [
        "A = {'a': 1,\n 'b': [2, -3]}  # fmt: skip",
        "import torch\nA: tuple = ((1, torch.float32),\n (2, torch.int8))  # fmt: skip",
        "A = frozenset({1,\n 2})  # fmt: skip",
        "from x import Row\nB = 1\nA = [Row(1, b=B),\n Row(2)]  # fmt: skip",
        "def f():\n    return [1,\n 2]  # fmt: skip",
        "def f():\n    for a in (1,\n 2):  # fmt: skip\n        pass",
        "import pytest\n@pytest.mark.parametrize('a', [1,\n 2], ids=lambda a: str(a))  # fmt: skip\ndef test(a): ...",
    ],
)
def test_a_mark_on_a_table_of_data_is_allowed(check: Any, source: str) -> None:
    assert list(check.misplaced(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "A = dict(a=1,\n b=2)  # fmt: skip",
        "A = [a for a in\n range(3)]  # fmt: skip",
        "def f(a):\n    return [a,\n 2]  # fmt: skip",
        "print(1,\n 2)  # fmt: skip",
        "assert [1] == [1,\n 2]  # fmt: skip",
        "def f(a,\n b):  # fmt: skip\n    pass",
        "A = {'a': lambda: 1,\n 'b': 2}  # fmt: skip",
        "# fmt: off\nA = [1]\n# fmt: on",
    ],
)
def test_a_mark_on_code_is_found(check: Any, source: str) -> None:
    assert len(list(check.misplaced(source))) == 1
