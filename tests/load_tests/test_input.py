"""`bench input`: what it sends, what it judges, and a run over small bodies."""

import argparse
import json
from pathlib import Path

import msgspec
import pytest

from troupellm.load_tests.bench.input import GAP_BAR, PROBE_BAR, Route, run, table
from troupellm.load_tests.flags.servers import long_bodies as add_flags
from troupellm.load_tests.traffic.bodies import bodies


def route(**fields: object) -> Route:
    plain = {"name": "x", "body_seconds": [1.0], "statuses": [200], "longest_probe": 0.0, "longest_gap": 0.0}
    return msgspec.convert(plain | fields, Route)


@pytest.mark.parametrize("size", [2**20, 8 * 2**20])
def test_no_body_is_longer_than_asked_for_nor_much_shorter(size: int) -> None:
    for body in bodies("a model", size):
        assert size * 0.95 < len(body.content) <= size, body.name
        assert json.loads(body.content)["model"] == "a model"


def test_waits_over_their_bars_and_wrong_answers_are_missed() -> None:
    assert route().kept
    assert not route(longest_probe=PROBE_BAR).kept
    assert not route(longest_gap=GAP_BAR).kept
    assert not route(wrong=True).kept
    shown = table([route(), route(longest_gap=1.0), route(wrong=True)], 8)
    assert [line.split("   ")[-1] for line in shown.splitlines()[2:5]] == ["kept", "MISSED", "WRONG ANSWER"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_small_bodies_go_through_every_route(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    result = tmp_path / "result.json"
    run(parser.parse_args(["--mebibytes", "1", "--rounds", "1", "--result-json", str(result)]))
    routes = json.loads(result.read_text())
    assert [one["wrong"] for one in routes] == [False] * 7
    assert all(one["longest_gap"] > 0 for one in routes)
