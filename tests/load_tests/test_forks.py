"""`bench forks`: what it makes of rounds, and a run at its smallest."""

import argparse
import json
from pathlib import Path

import pytest

from troupellm.load_tests.bench.forks import run, summarise, table
from troupellm.load_tests.contestants.forks import Arm
from troupellm.load_tests.flags.engine import forks as add_flags


async def never() -> list[list[int]]:
    raise AssertionError("nothing is measured here")


def arm(name: str, seconds: list[float], blocks: int | None, answers: list[list[int]]) -> Arm:
    return Arm(name, never, len(answers), peak_blocks=blocks, seconds=seconds, answers=answers)


def arms() -> dict[str, Arm]:
    return {
        "forks": arm("2 forks", [1.0, 2.0, 4.0], 10, [[1], [2]]),
        "requests": arm("2 requests", [2.0, 6.0, 9.0], 25, [[1], [3]]),
        "beams": arm("2 beams", [1.0, 1.0, 1.0], 12, [[4], [5]]),
        "requests_as_beams": arm("2 requests, as many as beams", [1.0, 2.0, 3.0], 24, [[1], [3]]),
    }


def test_ratios_are_medians_of_the_rounds_own() -> None:
    report = summarise(arms())
    forks, beams = report["ratios"]["requests / forks"], report["ratios"]["requests_as_beams / beams"]
    assert (forks["seconds"], forks["peak_blocks"]) == (2.25, 2.5)
    assert (beams["seconds"], beams["peak_blocks"]) == (2.0, 2.0)
    assert report["arms"]["forks"]["median_s"] == 2.0
    assert report["same_beams_as_transformers"] is None
    assert "2 requests / 2 forks: 2.25x the time, 2.50x the blocks" in table(report)


def test_a_report_tells_of_other_tokens_and_other_beams() -> None:
    every = arms() | {"transformers": arm("2 beams of transformers", [3.0, 3.0, 3.0], None, [[4], [6]])}
    every["requests"].answers = [[7], [3]]
    report = summarise(every)
    assert report["ratios"]["transformers / beams"]["peak_blocks"] is None
    assert (report["same_first_fork"], report["same_beams_as_transformers"]) == (False, [True, False])
    text = table(report)
    assert "OTHER TOKENS" in text
    assert "1 of 2 beams are those of transformers" in text


def test_forks_and_beams_share_blocks_and_give_the_tokens_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    result = tmp_path / "result.json"
    small = ["--preset", "tiny", "--prompt-len", "100", "--output-len", "10", "--forks", "4", "--beams", "3"]
    small += ["--repeats", "2", "--num-threads", "1", "--embedded", "--against-transformers"]
    assert run(parser.parse_args([*small, "--result-json", str(result)])) == 0
    report = json.loads(result.read_text())
    blocks = {name: each["peak_blocks"] for name, each in report["arms"].items()}
    assert blocks["forks"] < blocks["requests"] <= 4 * 7  # 109 positions each, 16 in a block
    assert blocks["beams"] < blocks["requests_as_beams"] <= 3 * 7
    assert blocks["transformers"] is None
    assert all(len(each["seconds"]) == 2 for each in report["arms"].values())
    assert report["same_beams_as_transformers"] == [True] * 3
    assert "the first fork has the tokens of the request with its seed" in capsys.readouterr().out
