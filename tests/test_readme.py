"""What the READMEs name is there: flags, benchmarks, public names. What they show of Python is Python."""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import troupellm
from troupellm.load_tests import cli as bench
from troupellm.server.cli.main import _COMMANDS, _parser
from troupellm.server.cli.vllm_flags import ELSEWHERE as MISSING

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "load_tests/README.md")
ELSEWHERE = {"--no-index", "--no-deps", "--target", "--folder", "--minutes", "--goals"}
"""Flags of pip, and of the scripts for a GPU."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def text_of(readme: str) -> str:
    return (ROOT / readme).read_text(encoding="utf-8")


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options_of(inner)


@pytest.mark.parametrize("readme", READMES)
def test_every_flag_is_one_of_ours(readme: str) -> None:
    benchmarks = argparse.ArgumentParser()
    bench.command(benchmarks.add_subparsers())
    known = ELSEWHERE | set(options_of(benchmarks))
    for command in _COMMANDS:
        known |= set(options_of(_parser(command)))
    named = set(_FLAG.findall(text_of(readme)))
    assert len(named) > 10
    assert named - known == set()


@pytest.mark.parametrize("readme", READMES)
def test_every_command_is_one_of_ours(readme: str) -> None:
    named = re.findall(r"`troupellm ([a-z-]+)(?: ([a-z]+))?", text_of(readme))
    assert {command for command, _ in named} <= {*_COMMANDS, "bench"}
    assert {inner for command, inner in named if command == "bench" and inner} <= set(bench._BENCHMARKS)


def test_every_benchmark_is_in_the_table() -> None:
    table = set(re.findall(r"^\| `troupellm bench ([a-z]+)", text_of("load_tests/README.md"), re.MULTILINE))
    assert table == set(bench._BENCHMARKS)


def test_every_public_name_is_there() -> None:
    text = text_of("README.md")
    names = set(re.findall(r"\btroupellm\.([A-Z]\w+)", text))
    assert names
    assert {name for name in names if not hasattr(troupellm, name)} == set()
    for owner, methods in ((troupellm.Engine, r"\bengine\.(\w+)\("), (troupellm.LLM, r"\bLLM\.(\w+)")):
        assert {name for name in re.findall(methods, text) if not hasattr(owner, name)} == set()


@pytest.mark.parametrize("readme", READMES)
def test_whoever_has_a_clone_and_nothing_else_can_type_what_is_shown(readme: str) -> None:
    """The command is in the environment, the package in no index, and the folders are everybody's own."""
    text = text_of(readme)
    assert "`source .venv/bin/activate`" in text
    assert "troupellm[" not in text
    assert "/tmp" not in text


def test_hints_name_no_package_that_no_index_has() -> None:
    sources = [
        path for package in ("models", "actors", "server", "load_tests") for path in (ROOT / package).rglob("*.py")
    ]
    assert len(sources) > 100
    assert not [path.name for path in sources if "troupellm[" in path.read_text(encoding="utf-8")]


NOT_YET = {
    "several devices": ("tensor-parallel-size", "pipeline-parallel-size", "enable-expert-parallel"),
    "images and audio": ("limit-mm-per-prompt", "allowed-media-domains"),
    "LoRA": ("enable-lora", "lora-modules", "max-loras", "max-lora-rank"),
    "weights in host memory": ("cpu-offload-gb",),
    "OpenTelemetry": ("otlp-traces-endpoint",),
    "metrics of single requests": ("enable-per-request-metrics",),
}


def test_what_is_not_there_yet_is_said_as_the_flags_say_it() -> None:
    section = text_of("README.md").partition("\n## Not there yet\n")[2].partition("\n## ")[0]
    assert [words for words in NOT_YET if words not in section] == []
    flags = {flag for listed in NOT_YET.values() for flag in listed}
    assert flags <= set(MISSING)
    assert {flag for flag, sentence in MISSING.items() if "not there yet" in sentence} <= flags


def test_python_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
