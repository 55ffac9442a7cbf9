"""`bench embed`: both contestants make the same vectors, and what it prints."""

import json
from pathlib import Path

import pytest

from troupellm.load_tests.bench.embed import make_texts, summarise, table
from troupellm.server.cli.main import main
from troupellm.tests.support.checkpoints import tiny_encoder


def test_bench_embed_reports_texts_per_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "encoder"
    tiny_encoder.write_encoder(folder, tiny_encoder.bert, pooling="mean_tokens", max_length=tiny_encoder.POSITIONS)
    result = tmp_path / "result.json"
    code = main(
        [
            "bench",
            "embed",
            "--model",
            str(folder),
            "--num-texts",
            "9",
            "--num-words",
            "1",
            "12",
            "--repeats",
            "2",
            "--batch-size",
            "4",
            "--num-threads",
            "1",
            "--result-json",
            str(result),
        ]
    )
    assert code == 0
    report = json.loads(result.read_text())
    assert set(report["texts_per_second"]) == {"troupellm", "transformers"}
    assert all(len(seconds) == 2 for seconds in report["seconds"].values())
    assert f"troupellm is {report['ratio']}x as fast" in capsys.readouterr().out


def test_the_ratio_is_the_median_of_the_repeats() -> None:
    report = summarise({"troupellm": [1.0, 2.0, 4.0], "transformers": [2.0, 6.0, 4.0]}, 8)
    assert report["ratio"] == 2.0
    assert report["texts_per_second"] == {"troupellm": 4.0, "transformers": 2.0}
    assert "4.0 texts/s" in table(report)


def test_texts_are_the_same_for_the_same_seed() -> None:
    texts = make_texts(20, 2, 5, seed=3)
    assert texts == make_texts(20, 2, 5, seed=3)
    assert {len(text.split()) for text in texts} == {2, 3, 4, 5}
