"""`bench hybrid`: a second turn computes its new tokens alone, and the table judges each figure."""

import json
from pathlib import Path

import pytest

from troupellm.load_tests.bench.hybrid import MOST_AGAIN, table
from troupellm.server.cli.main import main

REPORT = {
    "decode": {16: {"tokens_per_s": {"troupellm": 900.0, "transformers": 200.0}, "ratio": 4.5}},
    "second_turn": {"new_tokens": 41, "computed_tokens": 105, "ttft_by_first": 0.05},
    "snapshot_cost": 0.04,
}


def test_the_table_says_which_goals_are_kept() -> None:
    _, decode, turn, first_token, snapshots = table(REPORT).splitlines()
    assert decode.split() == ["16", "rows,", "by", "transformers", "4.50", "x", "wanted", "5.0", "x", "MISSED"]
    assert turn.endswith("105   wanted <= 105   kept")
    assert first_token.endswith("0.050 x   wanted <= 0.1 x   kept")
    assert snapshots.endswith("4.0%   wanted <= 3%   MISSED")
    assert "wanted" not in table(REPORT, judge=False)


@pytest.mark.slow
def test_bench_hybrid_measures_a_second_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    flags = {"--preset": "tiny", "--rows": "2", "--input-len": "9", "--output-len": "6", "--chat-len": "600"}
    more = {"--interval": "256", "--repeats": "1", "--num-threads": "1", "--result-json": str(result)}
    code = main(["bench", "hybrid", *[word for pair in (flags | more).items() for word in pair]])
    assert code == 0
    report = json.loads(result.read_text())
    turn = report["second_turn"]
    assert turn["new_tokens"] == 41
    assert turn["new_tokens"] <= turn["computed_tokens"] <= turn["new_tokens"] + MOST_AGAIN
    assert set(report["decode"]["2"]["tokens_per_s"]) == {"troupellm", "transformers"}
    assert "second turn, tokens computed" in capsys.readouterr().out
