"""A plug-in names the types that it needs from the root `troupellm`, and no module below it."""

import ast
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import troupellm
from troupellm import (
    BlockStore,
    ConnectorContext,
    EvictionPolicy,
    LogitsProcessor,
    LoraResolver,
    Matcher,
    Proposer,
    QuantizationFormat,
)
from troupellm.actors.adapters import resolvers
from troupellm.actors.kv_offload import eviction
from troupellm.models.chat_parsers import catalog
from troupellm.models.families import registry as families
from troupellm.models.kv_connectors import open_connectors
from troupellm.models.proposers import registry
from troupellm.models.quantization import formats
from troupellm.models.sampling import logits_processors

BASES = (BlockStore, EvictionPolicy, LogitsProcessor, LoraResolver, Matcher, Proposer, QuantizationFormat)
GROUPS = {
    logits_processors.GROUP: logits_processors.LogitsProcessor,
    open_connectors.GROUP: open_connectors.BlockStore,
    eviction.GROUP: eviction.EvictionPolicy,
    registry.GROUP: registry.Proposer,
    catalog.PLUGINS: catalog.CallSyntax,
    resolvers.GROUP: resolvers.LoraResolver,
    families.GROUP: families.DecoderConfig,
    formats.GROUP: formats.QuantizationFormat,
}


def classes_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for part in typing.get_args(hint):
        yield from classes_in(part)


def named_by(base: type) -> set[type]:
    """Classes of ours in the signatures of the methods that a plug-in writes."""
    methods = [
        member for _, member in inspect.getmembers(base, inspect.isfunction) if member.__module__ == base.__module__
    ]
    hints = [hint for method in methods for hint in typing.get_type_hints(method).values()]
    return {found for hint in hints for found in classes_in(hint) if found.__module__.startswith("troupellm.")}


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_every_type_in_a_plug_ins_methods_is_exported_from_the_root(base: type) -> None:
    assert named_by(base) | {base} <= {getattr(troupellm, name) for name in troupellm.__all__ if name != "Engine"}


def test_every_plug_in_group_expects_a_type_that_the_root_exports() -> None:
    assert sorted(GROUPS) == [
        "troupellm.connectors",
        "troupellm.dialects",
        "troupellm.kv_offload_policies",
        "troupellm.logits_processors",
        "troupellm.lora_resolvers",
        "troupellm.models",
        "troupellm.proposers",
        "troupellm.quantization",
    ]
    for kind in GROUPS.values():
        assert getattr(troupellm, kind.__name__) is kind


def test_a_connector_plug_in_gets_the_exported_context() -> None:
    assert open_connectors.ConnectorContext is ConnectorContext


def test_a_parser_plug_in_builds_its_syntax_from_exported_types() -> None:
    written = troupellm.Written(call="<call>\n{json}\n</call>")
    calls = troupellm.CallSyntax(forms=("<call>{json}</call>",), written=written)
    assert isinstance(calls, catalog.CallSyntax)
    assert isinstance(troupellm.Thinking(), catalog.Thinking)
    assert isinstance(troupellm.Channels(), catalog.Channels)


@pytest.mark.parametrize("plug_in", ["tcp_peer"])
def test_a_plug_in_of_the_tree_imports_exported_names_only(plug_in: str) -> None:
    folder = Path(__file__).resolve().parents[1] / "plugins" / plug_in
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "troupellm" in {node.module for node in imports}
    assert not [node.module for node in imports if str(node.module).startswith("troupellm.")]
