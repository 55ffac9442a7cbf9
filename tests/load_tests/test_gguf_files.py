"""`bench gguf`: the types in its files, its goals, and a run in small with our engine alone."""

import json
from pathlib import Path

import gguf
import pytest

from troupellm.load_tests.bench.gguf import GgufModels, judge
from troupellm.load_tests.peers.cells import Cell, Comparison
from troupellm.tests.load_tests.test_peers import bench


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def no_start(name: str) -> None:
    raise AssertionError(f"{name} is not needed to write a file")


def test_a_mixture_is_finer_in_its_head_and_in_half_of_its_layers(tmp_path: Path) -> None:
    models = GgufModels(tmp_path, [])
    path = models.path("troupellm", "q4_k_m", "tiny", no_start)
    found = types_of(path)
    assert found["token_embd.weight"] == "Q5_0"  # its rows are no multiples of 256
    assert found["output.weight"] == "Q8_0"
    for name in ("ffn_down", "attn_v"):
        assert [found[f"blk.{layer}.{name}.weight"] for layer in range(2)] == ["Q8_0", "Q5_0"]
    assert found["blk.0.attn_norm.weight"] == "F32"
    assert models.path("llama", "q4_k_m", "tiny", no_start) == path
    assert types_of(models.path("llama", "iq4_xs", "tiny", no_start))["blk.0.ffn_up.weight"] == "IQ4_NL"


def test_a_file_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    models = GgufModels(tmp_path, [str(tmp_path / "mine.gguf")])
    assert models.path("troupellm", "file", "mine", no_start) == tmp_path / "mine.gguf"
    assert models.vocab_size("mine") == 256


def comparison(name: str, ours: float, theirs: float | None) -> Comparison:
    rates = {"troupellm": ours} | ({} if theirs is None else {"llama": theirs})
    return Comparison("125m", "q4_0", Cell(name, 1, 8, 8), rates, {}, {})


def test_goals_are_for_every_cell_and_for_the_means() -> None:
    found = judge([comparison("1 seq", 12.0, 10.0), comparison("8 seq", 9.0, 10.0), comparison("prefill", 15.0, 10.0)])
    assert [round(one.found, 2) for one in found] == [0.9, 1.04, 1.5]
    assert [one.kept for one in found] == [False, False, True]
    assert judge([comparison("1 seq", 12.0, None)]) == []


@pytest.mark.slow
def test_bench_gguf_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without llama.cpp, which is named, our own rates are found."""
    result = tmp_path / "result.json"
    code = bench(
        "gguf",
        "--configs",
        "tiny",
        "--types",
        "q4_0",
        "iq4_xs",
        "--sequences",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "6",
        "--prefill-len",
        "16",
        "--rounds",
        "1",
        "--num-threads",
        "1",
        "--gguf-inputs",
        "int8",
        "--peers-dir",
        str(tmp_path / "none"),
        "--result-json",
        str(result),
    )
    report = json.loads(result.read_text())
    assert code == 0
    assert [(cell["precision"], cell["cell"]["name"]) for cell in report["cells"]] == [
        (precision, name) for precision in ("q4_0", "iq4_xs") for name in ("2 seq", "prefill")
    ]
    assert all(set(cell["rates"]) == {"troupellm"} for cell in report["cells"])
    assert "llama is not installed" in capsys.readouterr().out
