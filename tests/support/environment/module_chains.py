"""Attributes of imported modules that a source file uses, and a fresh process that looks them up.

A submodule that nothing imports by name is there only if another part of the program happened to import it.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Chain = tuple[str, ...]
"""A module and the attributes behind it, such as ("huggingface_hub", "constants", "HF_HUB_CACHE")."""

_CHILD = """
import json, os, sys
from importlib import import_module
from types import ModuleType

def lookup(chain):
    thing = sys.modules[chain[0]]
    for name in chain[1:]:
        if not isinstance(thing, ModuleType):
            return True
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True

def is_plain(chain):  # no module is loaded by looking it up
    thing = sys.modules[chain[0]]
    for name in chain[1:]:
        if not isinstance(thing, ModuleType):
            return True
        if name not in vars(thing):
            return False
        thing = vars(thing)[name]
    return True

def lookup_apart(chain):  # the lookup of another chain may load a submodule that this one needs
    if not (child := os.fork()):
        os._exit(0 if lookup(chain) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def load(name):
    try:
        import_module(name)
    except ModuleNotFoundError:  # `from module import name` of what is no module
        module, _, attribute = name.rpartition(".")
        if not module or not hasattr(import_module(module), attribute):
            raise

job = json.load(sys.stdin)
try:
    for name in job["modules"]:
        load(name)
except ImportError as error:
    print(json.dumps({"absent": str(error)}))
    sys.exit()
found = {chain: is_plain(chain) or lookup_apart(chain) for chain in map(tuple, job["chains"])}
print(json.dumps({"failed": [chain for chain in found if not found[chain]]}))
"""


@dataclass(frozen=True, slots=True)
class Use:
    """One chain in a file, and the modules of the same package that the file imports before it."""

    place: str
    chain: Chain
    imported: frozenset[str]


def uses_of(path: Path, place: str) -> Iterator[Use]:
    """Every chain of a file, with the imports at its top and in the functions around it."""
    yield from _uses(ast.parse(path.read_text(encoding="utf-8")), place, {}, frozenset())


@cache
def is_submodule(package: str, name: str) -> bool:
    """Whether the package has such a file or folder; it is not imported to find out."""
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return any((Path(folder) / file).exists() for folder in folders for file in (name, f"{name}.py"))


def failures(modules: list[str], chains: set[Chain]) -> set[Chain]:
    """The chains that a fresh process does not find after it imported the modules; none where one is not installed.

    The first of the modules is the package that all chains begin with.
    """
    job = json.dumps({"modules": modules, "chains": sorted(chains)})
    alone = ["-S"] if modules[0] in sys.stdlib_module_names else []  # `site` imports some of the standard library
    done = subprocess.run(
        [sys.executable, *alone, "-W", "ignore", "-c", _CHILD], input=job, check=True, capture_output=True, text=True
    )
    return {tuple(chain) for chain in json.loads(done.stdout.splitlines()[-1]).get("failed", ())}


def _uses(scope: ast.AST, place: str, outer: dict[str, str], before: frozenset[str]) -> Iterator[Use]:
    inner, nodes = [], []
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner.append(node)
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting.extend(node.orelse)
            continue
        nodes.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    rebound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    rebound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound = {name: module for name, module in outer.items() if name not in rebound}
    modules = set(before)
    for node in nodes:
        for name, module, loaded in _bindings(node):
            bound[name] = module
            modules |= loaded
    for node in nodes:
        if isinstance(node, ast.Attribute) and (chain := _chain(node, bound)) is not None:
            root = chain[0]
            own = frozenset(name for name in modules if name.split(".")[0] == root)
            yield Use(f"{place}:{node.lineno}", chain, own)
    for node in inner:
        yield from _uses(node, place, bound, frozenset(modules))


def _bindings(node: ast.AST) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Name, module behind it, and the modules that the statement loads."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                root = alias.name.split(".")[0]
                yield alias.asname or root, alias.name if alias.asname else root, frozenset({root, alias.name})
        case ast.ImportFrom(module=str(module), names=names):
            for alias in names:
                root = module.split(".")[0]
                loaded = frozenset({root, module, f"{module}.{alias.name}"})
                yield alias.asname or alias.name, f"{module}.{alias.name}", loaded


def _chain(node: ast.Attribute, bound: dict[str, str]) -> Chain | None:
    parts: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    if not isinstance(value, ast.Name) or value.id not in bound:
        return None
    return (*bound[value.id].split("."), *reversed(parts))
