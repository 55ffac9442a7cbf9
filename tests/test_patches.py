"""Every patch of a running program by a test is listed in patched_tests.tsv with the reason why it hides no fault.

A patched import hid that no hub id loaded in a fresh process. So no test patches an import of the product, and no test
puts a fake in the place of the part that it is about.
"""

from functools import cache
from pathlib import Path

from troupellm.tests.support.environment.patches import patches_of

TESTS = Path(__file__).resolve().parent
TABLE = TESTS / "patched_tests.tsv"
KINDS = {
    "constant": "a limit, a size, a time or a path; the code that reads it is the product's",
    "observes": "the original runs too; the test counts or orders its calls",
    "outside": "a clock, the operating system, a library, or the packages that are installed",
    "hardware": "a GPU, a number of cores or an instruction set that this machine lacks, or lacks for once",
    "fault": "a part fails, is late or must not be called; other tests of the same room run it as it is",
    "object": "one object of the test, mostly a double from tests/support, not the program's code",
    "measurement": "numbers of a long measurement; the test is about the report that is made of them",
    "fixed": "an estimate or a choice has one value; its own tests run it as it is",
}
"""Why a patch of the kind is harmless. The last column of the table tells more where that is not plain."""
IMPORTS = ("import_module", "find_spec", "__import__", "sys.modules", "sys.meta_path", "sys.path")
OWN = {("models/proposers/test_registry.py", "sys.modules.guessers")}
"""A module of the test itself, which it forgets at its end."""


def listed() -> dict[tuple[str, str], str]:
    """The kind of each file and target."""
    head, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert head == "file\ttarget\tkind\treason"
    rows = [line.split("\t") for line in lines]
    assert rows == sorted(rows)
    return {(row[0], row[1]): row[2] for row in rows}


@cache
def found() -> set[tuple[str, str]]:
    """File and target of each patch in the tests."""
    return {
        (path.relative_to(TESTS).as_posix(), target) for path in TESTS.rglob("*.py") for target, _ in patches_of(path)
    }


def test_every_patch_is_listed_with_a_harmless_kind() -> None:
    table, patches = listed(), found()
    assert len(patches) > 300
    assert not sorted(patches - table.keys()), "add a row with one of KINDS, or do without the patch"
    assert not sorted(table.keys() - patches), "the row has no patch any more"
    assert set(table.values()) == KINDS.keys()


def test_no_test_patches_an_import() -> None:
    assert not [(file, target) for file, target in found() - OWN if any(name in target for name in IMPORTS)]


def test_each_way_to_patch_is_found(tmp_path: Path) -> None:
    file = tmp_path / "test_module.py"
    file.write_text(
        "import sys\nfrom unittest import mock\nfrom troupellm.models.hub import source\n"
        "def test(monkeypatch):\n    monkeypatch.setattr(source, 'resolve', 1)\n"
        "    monkeypatch.setattr('troupellm.a.b', 2)\n    monkeypatch.delattr(source.thing, 'c')\n"
        "    monkeypatch.setitem(sys.modules, 'torch', None)\n    sys.modules['numpy'] = None\n    source.d = 3\n"
        "    with mock.patch('troupellm.e'), mock.patch.object(source, 'f'):\n        pass\n"
    )
    targets = [target.removeprefix("troupellm.") for target, _ in patches_of(file)]
    expected = [
        "a.b",
        "e",
        "models.hub.source.d",
        "models.hub.source.f",
        "models.hub.source.resolve",
        "models.hub.source.thing.c",
    ]
    assert sorted(targets) == [*expected, "sys.modules.numpy", "sys.modules.torch"]
