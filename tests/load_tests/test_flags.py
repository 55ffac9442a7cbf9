"""The checks that every benchmark makes of its flags before it measures."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from troupellm.actors.engine import engine
from troupellm.load_tests import cli
from troupellm.load_tests.flags.serve import SAMPLING

ANY_NUMBER = {"--seed", "--port", "--temperature", *("--" + name.replace("_", "-") for name in SAMPLING)}
"""The generator, the system and the server check the values of these flags."""


def bench(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.command(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    return int(args.func(args))


def read(action: argparse.Action, text: str) -> Any:
    """The value that a flag makes of a text, None where it refuses it."""
    assert callable(action.type)
    try:
        return action.type(text)
    except (argparse.ArgumentTypeError, ValueError):
        return None


def numbers(name: str) -> list[argparse.Action]:
    """The flags of a benchmark that take numbers."""
    parser = argparse.ArgumentParser()
    cli.BENCHMARKS[name][0](parser)
    typed = [action for action in parser._actions if action.type is not None]
    return [action for action in typed if isinstance(read(action, "1"), int | float)]


@pytest.mark.parametrize("name", sorted(cli.BENCHMARKS))
def test_numbers_that_mean_nothing_are_refused(name: str) -> None:
    accepted = [
        f"{action.option_strings[0]} {text}"
        for action in numbers(name)
        for text in ("-1", "nan", "-0.5")
        if action.option_strings[0] not in ANY_NUMBER and read(action, text) is not None
    ]
    assert accepted == []


def test_flags_with_numbers_are_found() -> None:
    assert {"--prompts", "--waves", "--repeats"} <= {action.option_strings[0] for action in numbers("prefill")}
    assert "--minutes" in {action.option_strings[0] for action in numbers("soak")}


def test_a_flag_is_not_taken_by_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("prefill", "--repeat", "3")
    assert "unrecognized arguments: --repeat 3" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--minutes", "--max-slope"])
def test_a_soak_comes_to_an_end(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("soak", flag, "inf")
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("place", ["none/result.json", ""])
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("prefill", "--result-json", str(tmp_path / place)) == 2
    told = capsys.readouterr()
    assert "--result-json" in told.err
    assert not told.out


class Opened(Exception):
    """Instead of an engine."""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("forks", ["--preset", "tiny"]),
        ("guide", ["--models", "tiny"]),
        ("speculation", ["--parts", "ngram", "--prompts", "1"]),
    ],
)
def test_nothing_is_imported_beside_what_is_measured(
    name: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare worker process begins to import torch a second after its engine has started."""

    def refuse(_: object, **settings: Any) -> None:
        raise Opened(settings["spare_worker"])

    monkeypatch.setattr(engine, "Engine", refuse)
    with pytest.raises(Opened) as opened:
        bench(name, *more)
    assert opened.value.args == (False,)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("guide", ["--models", "tiny"]),
        ("offload", ["--preset", "tiny", "--parts", "host", "--prefix-len", "32"]),
        ("prefill", ["--preset", "tiny"]),
    ],
)
def test_all_cores_are_those_that_this_process_may_use(
    name: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object, **settings: Any) -> None:
        raise Opened(settings["num_threads"])

    monkeypatch.setattr(engine, "Engine", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    with pytest.raises(Opened) as opened:
        bench(name, *more)
    assert opened.value.args == (3,)
