"""Nothing that is read is ever run: no pickles, no `torch.load`, no `eval`, no code of a checkpoint.

The linter's ban of the same names is switched off in folders that need other names of its list; this looks everywhere.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protocol", "kernels", "models", "actors", "server", "load_tests", "training", "plugins", ".ci")
FILES = sorted([ROOT / "__init__.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))])

MODULES = frozenset({"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
FUNCTIONS = frozenset({"eval", "exec", "compile", "__import__"})
OF_TORCH = ("torch.load", "torch.save", "torch.jit.load", "torch.package", "torch.hub")
QUALIFIED = frozenset({*OF_TORCH, *(f"builtins.{name}" for name in FUNCTIONS)})
SWITCHES = frozenset({"trust_remote_code", "allow_pickle"})
"""Arguments and keys that may be there to say no."""
LOADERS = frozenset({"import_module", "find_spec"})


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that runs, or may run, what was read."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names if is_banned(alias.name)]
            case ast.ImportFrom(module=str(module), names=names):
                found = [name for alias in names if is_banned(name := f"{module}.{alias.name}")]
            case ast.Attribute():
                found = [name] if (name := ast.unparse(node)) in QUALIFIED else []
            case ast.Name(id=name):
                found = [name] if name in FUNCTIONS else []
            case ast.keyword(arg=str(name), value=value):
                found = [name] if name in SWITCHES and not is_no(value) else []
            case ast.Dict(keys=keys, values=values):
                given = [key.value if isinstance(key, ast.Constant) else None for key in keys]
                pairs = zip(given, values, strict=True)
                found = [str(name) for name, value in pairs if name in SWITCHES and not is_no(value)]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(text)), *_]):
                found = [text] if name in LOADERS and is_banned(text) else []
            case _:
                continue
        yield from ((getattr(node, "lineno", 0), name) for name in found)


def is_banned(name: str) -> bool:
    """Of a module, or of something in one."""
    return name.split(".")[0] in MODULES or name in QUALIFIED


def is_no(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_nothing_that_is_read_is_run() -> None:
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {name}"
        for path in FILES
        for line, name in dangers(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import pickle", ["pickle"]),
        ("import os, marshal", ["marshal"]),
        ("from shelve import open", ["shelve.open"]),
        ("import_module('dill')", ["dill"]),
        ("importlib.import_module('cloudpickle')", ["cloudpickle"]),
        ("state = torch.load(path)", ["torch.load"]),
        ("from torch import save", ["torch.save"]),
        ("model = torch.hub.load('x')", ["torch.hub"]),
        ("eval(text)", ["eval"]),
        ("run = exec", ["exec"]),
        ("builtins.eval(text)", ["builtins.eval"]),
        ("__import__(name)", ["__import__"]),
        ("AutoConfig.from_pretrained(folder, trust_remote_code=True)", ["trust_remote_code"]),
        ("AutoConfig.from_pretrained(folder, trust_remote_code=flag)", ["trust_remote_code"]),
        ("options = {'trust_remote_code': True}", ["trust_remote_code"]),
        ("np.load(path, allow_pickle=True)", ["allow_pickle"]),
        ("AutoConfig.from_pretrained(folder, trust_remote_code=False)", []),
        ("hints = {'trust-remote-code': 'it is never run'}", []),
        ("model.eval()", []),
        ("torch.compile(step)", []),
        ("re.compile(text)", []),
        ("import torch", []),
        ("safetensors.torch.load(data)", []),
    ],
)
def test_calls_that_run_code_are_found(code: str, names: list[str]) -> None:
    assert [name for _, name in dangers(ast.parse(code))] == names
