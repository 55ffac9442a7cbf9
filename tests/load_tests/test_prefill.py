"""`bench prefill`: its clients, its ratios, and a run at its smallest."""

import argparse
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import anyio
import pytest

from troupellm.load_tests.bench.prefill import Side, load, run, summarise
from troupellm.load_tests.flags.engine import prefill as add_flags

FIRST_OF_A, SECOND_OF_A, FIRST_OF_B, SECOND_OF_B = [1, 1], [1, 2], [2, 1], [2, 2]


class Answer:
    """A stream of two pieces; the last one waits for `held`, where there is something to wait for."""

    def __init__(self, tokens: int, held: anyio.Event | None) -> None:
        self.usage = SimpleNamespace(completion_tokens=tokens)
        self._pieces = self._read(held)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def _read(self, held: anyio.Event | None) -> AsyncIterator[str]:
        yield "first"
        if held is not None:
            await held.wait()
        yield "last"


class Engine:
    """Client A's first answer ends when client B has sent both of its prompts."""

    def __init__(self, tokens: int) -> None:
        self.sent: list[list[int]] = []
        self._tokens, self._b_is_through = tokens, anyio.Event()

    def stream(self, prompt: list[int], **_: Any) -> Answer:
        self.sent.append(prompt)
        if prompt == SECOND_OF_B:
            self._b_is_through.set()
        return Answer(self._tokens, self._b_is_through if prompt == FIRST_OF_A else None)


def test_a_client_waits_for_its_own_answers_and_for_nobody_elses() -> None:
    async def main() -> tuple[Engine, Any]:
        engine = Engine(tokens=3)
        return engine, await load(engine, [[FIRST_OF_A, SECOND_OF_A], [FIRST_OF_B, SECOND_OF_B]], 3)

    engine, found = anyio.run(main)
    assert engine.sent == [FIRST_OF_A, FIRST_OF_B, SECOND_OF_B, SECOND_OF_A]
    assert len(found.first_token) == 4
    assert found.tokens == 4 * (2 + 3)
    assert found.rate == found.tokens / found.seconds


def test_an_answer_of_another_length_is_no_result() -> None:
    async def main() -> None:
        await load(Engine(tokens=2), [[SECOND_OF_A]], 3)

    with pytest.raises(ExceptionGroup) as caught:
        anyio.run(main)
    assert "wanted number of tokens" in str(caught.value.exceptions[0])


def test_ratios_are_medians_of_the_rounds_own() -> None:
    budget = Side("budget", 4, [1.0, 2.0, 9.0], [], [10.0, 20.0, 30.0], [1.0, 1.0, 1.0], [8.0, 9.0, 7.0])
    whole = Side("one step", 9, [2.0, 8.0, 10.0], [], [20.0, 20.0, 20.0], [4.0, 5.0, 2.0], [4.0, 10.0, 7.0])
    assert summarise([budget, whole]) == {
        "first_token_ratio": 0.5,
        "throughput_ratio": 1.0,
        "sustained_first_token_ratio": 0.25,
        "sustained_throughput_ratio": 1.0,
    }


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(given)


@pytest.mark.parametrize("flag", ["--prompts", "--prompt-len", "--output-len", "--waves", "--repeats", "--threads"])
def test_nothing_is_measured_with_none_of_something(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(flag, "0")
    assert f"argument {flag}: 0 is not at least 1" in capsys.readouterr().err


def test_bench_prefill_reports_each_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    sizes = ["--preset", "tiny", "--prompts", "3", "--prompt-len", "16", "--output-len", "2", "--repeats", "2"]
    assert run(arguments(*sizes, "--waves", "3", "--threads", "1", "--result-json", str(result))) == 0
    report = json.loads(result.read_text())
    assert [side["name"] for side in report["sides"]] == ["budget", "one step"]
    for side in report["sides"]:
        for name in ("first_token", "last_first_token", "rate", "sustained_first_token", "sustained_rate"):
            assert len(side[name]) == 2
            assert min(side[name]) > 0
    given = {"preset": "tiny", "prompts": 3, "prompt_len": 16, "output_len": 2, "waves": 3, "num_threads": 1}
    assert given.items() <= report.items()
    text = capsys.readouterr().out
    assert f"one wave: median TTFT {report['first_token_ratio']:.2f}x" in text
    assert f"sustained: median TTFT {report['sustained_first_token_ratio']:.2f}x" in text
    assert f"throughput {report['sustained_throughput_ratio']:.2f}x" in text
