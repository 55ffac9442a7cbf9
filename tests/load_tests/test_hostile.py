"""`bench hostile`: floods of one key beside a stream and requests of others, in small."""

import json
from pathlib import Path

import pytest

from troupellm.load_tests.bench.hostile import Figure, table
from troupellm.server.cli.main import main


def test_a_figure_is_kept_up_to_its_bar_and_without_a_failure() -> None:
    figures = [
        Figure(flood="a", measured="b", value=value, bar=1.0, failed=failed)
        for value, failed in ((1.0, ""), (1.5, ""), (0.5, "lost"))
    ]
    assert [figure.kept for figure in figures] == [True, False, False]


def test_the_table_has_times_in_milliseconds_and_names_what_is_over_its_bar() -> None:
    figures = [
        Figure(flood="2 bodies", measured="last answer", value=0.25, bar=0.2, beside_plain=0.1, failed="1 lost"),
        Figure(flood="2 bodies", measured="growth of the server", value=12.4, bar=200.0, unit="MiB"),
    ]
    _, answer, growth = table(figures).splitlines()
    assert answer.split()[-6:] == ["250", "100", "200", "over:", "1", "lost"]
    assert growth.split()[-2:] == ["12", "200"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bench_hostile_in_small(tmp_path: Path) -> None:
    """Whether the waits keep to their bars is for a quiet machine; the memory does on any."""
    result = tmp_path / "result.json"
    sizes = "--clients 2 --schema-bytes 2000 --prompts 4 --bodies 4 --body-bytes 1000000 --rounds 2"
    assert main(["bench", "hostile", *sizes.split(), "--result-json", str(result)]) in (0, 1)
    figures = json.loads(result.read_text())
    assert {figure["measured"] for figure in figures} == {
        "gap of a stream",
        "small schema of another key",
        "first token of another key",
        "chat of another key",
        "last answer",
        "growth of the server",
        "growth that is left",
    }
    assert not [figure["failed"] for figure in figures if figure["failed"]]
    assert all(figure["value"] <= figure["bar"] for figure in figures if figure["unit"] == "MiB")
