"""The documents name flags, benchmarks, routes, make targets and public names that exist, and their commands parse.

`api/test_readme_examples.py` runs the README's programs.
"""

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import troupellm
from troupellm.load_tests import cli as bench
from troupellm.load_tests.gpu.session import parser_of_session
from troupellm.protocol.config.engine import ServerConfig, TenantConfig
from troupellm.protocol.vllm.flags import REFUSED as MISSING
from troupellm.server.access import keys
from troupellm.server.app.app import App
from troupellm.server.base.router import Router
from troupellm.server.cli.flags import load_configs, normalise, translate
from troupellm.server.cli.main import _COMMANDS, _parser
from troupellm.server.host.server_state import ServerState

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("protocol", "kernels", "models", "actors", "server", "tests", "load_tests", "training", "plugins")
_PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
READMES = ("README.md", *(f"{folder}/README.md" for folder in FOLDERS), *_PAGES)
"""All documents of the product: the README, those of the top folders, and the pages below docs/."""
ELSEWHERE = {
    "--no-index", "--no-deps", "--target", "--folder", "--without-amx", "--rootdir", "--import-mode",
}  # fmt: skip
"""Flags of pip, of pytest, of the script that fetches wheels and of `make peers`."""
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
    known = ELSEWHERE | set(options_of(benchmarks)) | set(options_of(parser_of_session()))
    for command in _COMMANDS:
        known |= set(options_of(_parser(command)))
    assert set(_FLAG.findall(text_of(readme))) - known == set()


@pytest.mark.parametrize("readme", READMES)
def test_every_command_is_one_of_ours(readme: str) -> None:
    named = re.findall(r"`troupellm ([a-z-]+)(?: ([a-z]+))?", text_of(readme))
    assert {command for command, _ in named} <= {*_COMMANDS, "bench"}
    assert {inner for command, inner in named if command == "bench" and inner} <= set(bench.BENCHMARKS)


def code_of(readme: str) -> list[str]:
    """The lines of all code blocks, fenced or indented; one that goes on with a backslash is one."""
    text = text_of(readme)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def commands_of(readme: str) -> list[list[str]]:
    """Arguments of every `troupellm` command, in code blocks and between backticks, but for those with gaps."""
    typed = [line for line in code_of(readme) if line.startswith("troupellm ")]
    typed += re.findall(r"`(troupellm [^`\n]+)`", text_of(readme))
    found = [[word for word in shlex.split(line, comments=True)[1:] if word != "&"] for line in typed]
    return [words for words in found if words != ["bench"] and not {"...", "[MODEL]"}.intersection(words)]


def benchmarks() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    bench.command(parser.add_subparsers())
    return parser


def understand(arguments: list[str]) -> None:
    """As the command does before anything is started.

    Raises:
        ConfigError, SystemExit: it would refuse them.
    """
    if arguments[0] == "bench":
        benchmarks().parse_args(normalise(arguments))
    elif arguments[0] in ("serve", "run-batch"):
        engine, _ = load_configs(_parser(arguments[0]).parse_args(translate(arguments)), {})
        engine.check()
    else:
        _parser(arguments[0]).parse_args(normalise(arguments))


@pytest.mark.parametrize("readme", READMES)
def test_every_command_is_understood_as_it_stands(readme: str) -> None:
    for arguments in commands_of(readme):
        understand(arguments)


def test_the_documents_show_enough_for_these_tests_to_mean_something() -> None:
    assert len(READMES) > 15
    assert sum(len(commands_of(readme)) for readme in READMES) > 60
    assert sum(len(set(_FLAG.findall(text_of(readme)))) for readme in READMES) > 200
    assert sum(len(routes_of(readme)) for readme in READMES) > 40


@pytest.mark.parametrize("readme", READMES)
def test_every_flag_takes_the_value_that_it_is_shown_with(readme: str) -> None:
    shown = [shlex.split(piece) for piece in re.findall(r"`(--[^`\n]* [^`\n]*)`", text_of(readme))]
    gaps = {word for words in shown for word in words if "|" in word or (word.isalpha() and word.isupper())}
    whole = [words for words in shown if not gaps.intersection(words)]
    served = set(options_of(_parser("serve")))
    (of_bench,) = (
        action.choices["bench"] for action in benchmarks()._actions if isinstance(action, argparse._SubParsersAction)
    )
    (measured,) = (action.choices for action in of_bench._actions if isinstance(action, argparse._SubParsersAction))
    for words in whole:
        flags = {word for word in words if word.startswith("--")}
        if flags <= set(options_of(parser_of_session())):
            continue  # of the GPU script, whose goals stand as "G9 G10 ..."
        if flags <= served:
            understand(["serve", "--kv-offloading-size", "1", *words])
        elif not flags & ELSEWHERE:
            name = next(name for name, parser in measured.items() if flags <= set(options_of(parser)))
            understand(["bench", name, *words])


def routes_of(readme: str) -> set[str]:
    return set(re.findall(r"`(?:GET |POST )?(/[a-z][^`\s?]*)", text_of(readme))) - {"/v1"}


@pytest.mark.parametrize("readme", READMES)
def test_every_route_is_there(readme: str) -> None:
    app = App(ServerState(ServerConfig(admin_api_key=("admin",), ui=True)), scopes=("open", "api", "admin"))
    router = Router(app.routes)
    assert {path for path in routes_of(readme) if router.find(path.encode()) is None} == set()


@pytest.mark.parametrize("readme", READMES)
def test_every_link_leads_to_a_file_and_a_heading(readme: str) -> None:
    folder = (ROOT / readme).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(readme)):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = (folder / name).resolve() if name else ROOT / readme
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}
            assert heading in slugs, target


@pytest.mark.parametrize("readme", READMES)
def test_every_path_is_there(readme: str) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", text_of(readme))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_at_most_two_hundred_lines() -> None:
    assert len(text_of("README.md").splitlines()) <= 200


@pytest.mark.parametrize("readme", READMES)
def test_every_target_and_every_variable_of_make_is_there(readme: str) -> None:
    makefile = text_of("Makefile")
    typed = [line for line in code_of(readme) if line.startswith("make ")]
    typed += re.findall(r"`(make [^`\n]+)`", text_of(readme))
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert {line.split()[1] for line in typed} <= set(targets.split())
    variables = {name for line in typed for name in re.findall(r"\b([A-Z_]+)=", line)}
    assert {name for name in variables if not re.search(rf"^{name} \?=", makefile, re.MULTILINE)} == set()


def shown_keys() -> Iterator[str]:
    yield from re.findall(r"```toml\n(.*?)```", text_of("docs/keys-and-limits.md"), re.DOTALL)
    yield "\n".join(re.findall(r"^ {4}(.*)$", keys.__doc__ or "", re.MULTILINE))


def test_the_key_file_is_one_that_is_taken(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 100_000, "max_concurrency": 8}
    limits |= {"models": ("base", "sql-*")}
    shown = list(shown_keys())
    assert len(shown) == 2
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.toml"
        path.write_text(text, encoding="utf-8")
        given = keys.read_keys(ServerConfig(api_key_file=str(path)))
        assert given.tenants == (TenantConfig(name="alice", weight=2.0, priority=0, **limits),)


def test_every_benchmark_is_in_the_table() -> None:
    table = set(re.findall(r"^\| `troupellm bench ([a-z]+)", text_of("load_tests/README.md"), re.MULTILINE))
    assert table == set(bench.BENCHMARKS)


@pytest.mark.parametrize("readme", READMES)
def test_every_public_name_is_there(readme: str) -> None:
    text = text_of(readme)
    names = set(re.findall(r"\btroupellm\.([A-Z]\w+)", text))
    assert {name for name in names if not hasattr(troupellm, name)} == set()
    for owner, methods in ((troupellm.Engine, r"\bengine\.(\w+)\("), (troupellm.LLM, r"\bLLM\.(\w+)")):
        assert {name for name in re.findall(methods, text) if not hasattr(owner, name)} == set()


@pytest.mark.parametrize("readme", READMES)
def test_the_commands_work_in_a_clone_without_other_preparation(readme: str) -> None:
    """The command is in the environment, and the package is in no index."""
    text = text_of(readme)
    assert "troupellm[" not in text
    assert "/tmp" not in text


@pytest.mark.parametrize("readme", ["README.md", "docs/serving.md", "load_tests/README.md"])
def test_a_page_that_begins_with_commands_says_where_the_command_is(readme: str) -> None:
    assert "`source .venv/bin/activate`" in text_of(readme)


def test_hints_name_no_package_that_no_index_has() -> None:
    sources = [
        path for package in ("models", "actors", "server", "load_tests") for path in (ROOT / package).rglob("*.py")
    ]
    assert len(sources) > 100
    assert not [path.name for path in sources if "troupellm[" in path.read_text(encoding="utf-8")]


NOT_YET = {
    "several devices": ("pipeline-parallel-size", "enable-expert-parallel"),
    "audio and video": ("media-io-kwargs",),
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


def test_the_readmes_python_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
