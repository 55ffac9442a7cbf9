"""`bench offline`: its processes, its models, its arithmetic, and a run in small with the contestants that are here."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from troupellm.load_tests import cli
from troupellm.load_tests.bench.offline import Bench, RandomModels
from troupellm.load_tests.peers.cells import Cell, Comparison, Measured, compare, geometric_mean, judge
from troupellm.load_tests.peers.checkpoints import model_for, write_compressed
from troupellm.load_tests.peers.environments import environment_of, link_package, python_of
from troupellm.load_tests.peers.process import Contestant, ContestantError, unwinding
from troupellm.load_tests.peers.table import judgement, line, means
from troupellm.load_tests.random_model import SHAPES, Shape, write_random_model

SIDE = """
import sys

class Echo:
    versions = {"echo": "1"}

    def __init__(self, short):
        self.short = short

    def answer(self, prompts, output_len):
        print("noise of a library")
        if output_len == 13:
            raise ValueError("an unlucky number")
        if output_len == 14:
            sys.exit(3)
        return [prompt[:1] * (output_len - self.short) for prompt in prompts]

make = Echo
"""


def bench(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.command(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    return int(args.func(args))


@pytest.fixture
def echo(tmp_path: Path) -> Any:
    (tmp_path / "echo_side.py").write_text(SIDE)
    link = link_package(tmp_path)
    python = Path(sys.executable)
    environment = environment_of("transformers", python, link, 1)
    command = [str(python), "-m", "troupellm.load_tests.peers.sides.loop", "echo_side"]
    contestant = Contestant("echo", command, environment=environment, log=tmp_path / "echo.log")
    yield contestant
    contestant.close()


def test_a_contestant_answers_by_lines_and_tells_its_versions(echo: Contestant) -> None:
    echo.make(60.0, short=0)
    assert echo.versions == {"echo": "1"}
    echo.freeze()
    with echo.awake():
        seconds, answers = echo.answer([[7, 8], [9]], 3, 60.0)
    assert answers == [[7, 7, 7], [9, 9, 9]]
    assert seconds > 0


def test_a_contestant_that_fails_says_why(echo: Contestant) -> None:
    echo.make(60.0, short=0)
    with pytest.raises(ContestantError, match="echo: ValueError: an unlucky number"):
        echo.answer([[1]], 13, 60.0)
    assert echo.answer([[1]], 2, 60.0)[1] == [[1, 1]]
    with pytest.raises(ContestantError, match="its process ended"):
        echo.answer([[1]], 14, 60.0)


def test_answers_that_are_too_short_do_not_count(echo: Contestant) -> None:
    echo.make(60.0, short=1)
    with pytest.raises(ContestantError, match="wanted number of tokens"):
        echo.answer([[1]], 4, 60.0)


@pytest.fixture
def as_usual() -> Iterator[None]:
    """The signals that end a benchmark do what they do in a terminal, however these tests are run."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_usual")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_that_is_ended_takes_its_contestants_along(echo: Contestant, number: signal.Signals) -> None:
    echo.make(60.0, short=0)
    echo.freeze()

    def ended() -> None:
        with unwinding(), closing(echo):
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as left:
        ended()
    assert left.value.code == 128 + number
    assert echo.process.returncode is not None
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.usefixtures("as_usual")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_that_is_ended_again_goes_on_cleaning_up(number: signal.Signals) -> None:
    """Of a terminal that closes one signal comes from the shell and one from the kernel."""
    closed: list[str] = []

    def close(name: str) -> None:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        closed.append(name)

    def ended() -> None:
        with unwinding():
            try:
                signal.raise_signal(number)
            finally:
                for name in ("one", "other"):
                    close(name)

    with pytest.raises(SystemExit) as left:
        ended()
    assert left.value.code == 128 + number
    assert closed == ["one", "other"]
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.usefixtures("as_usual")
def test_a_benchmark_that_shall_survive_its_terminal_does() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with unwinding():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert callable(signal.getsignal(signal.SIGTERM))


def test_a_contestant_that_is_named_twice_is_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them would be left behind, stopped."""
    started: list[str] = []
    monkeypatch.setattr(Bench, "_made", lambda self, name, *_: started.append(name))
    args = argparse.Namespace(contestants=["vllm", "troupellm", "vllm"], result_json=None, rounds=1, seed=0)
    Bench(args, tmp_path, 1, RandomModels(tmp_path)).compete("tiny", "fp32", [])
    assert started == ["vllm", "troupellm"]


def test_an_environment_that_is_not_installed_has_no_python(tmp_path: Path) -> None:
    assert python_of("openvino", tmp_path) is None
    (tmp_path / "openvino" / "bin").mkdir(parents=True)
    (tmp_path / "openvino" / "bin" / "python").touch()
    assert python_of("openvino", tmp_path) is None, "a half-made environment"
    (tmp_path / "openvino" / ".installed").touch()
    assert python_of("openvino", tmp_path) == tmp_path / "openvino" / "bin" / "python"
    assert python_of("troupellm", tmp_path) == Path(sys.executable)


@pytest.mark.parametrize("name", ["openvino", "vllm", "llama", "transformers"])
def test_only_ours_keeps_what_python_was_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    paths = [environment_of(who, tmp_path / "python", tmp_path, 2)["PYTHONPATH"] for who in ("troupellm", "vllm")]
    assert paths == [f"{tmp_path}{os.pathsep}{Path('elsewhere').absolute()}", str(tmp_path)]
    assert environment_of(name, tmp_path / "python", tmp_path, 2)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("name", ["24m", "qwen3-0.6b"])
def test_models_have_their_sizes(name: str) -> None:
    assert SHAPES[name].num_parameters == pytest.approx({"24m": 24.4e6, "qwen3-0.6b": 596e6}[name], rel=0.01)


def test_a_random_qwen3_is_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = Shape(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        head_dim=32,
        family="qwen3",
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(write_random_model(tmp_path / "model", shape))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(weight.numel() for weight in model.parameters()) == shape.num_parameters


def test_the_compressed_model_is_the_model(tmp_path: Path) -> None:
    source = write_random_model(tmp_path / "source", SHAPES["tiny"])
    (tmp_path / "target").mkdir()
    target = write_compressed(source, tmp_path / "target")
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert after[name].dtype == np.int8
    assert after[f"{name}_scale"].shape == (before[name].shape[0], 1)
    restored = after[name] * after[f"{name}_scale"]
    assert np.abs(restored - before[name]).max() <= after[f"{name}_scale"].max() / 2 * 1.001
    np.testing.assert_array_equal(after["lm_head.weight"], before["lm_head.weight"])
    assert json.loads((target / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"


def test_a_model_is_written_once_and_whole(tmp_path: Path) -> None:
    def never(name: str) -> Contestant:
        raise ContestantError(f"{name} has no converter")

    first = model_for("vllm", "int8", "tiny", tmp_path, never)
    time = (first / "model.safetensors").stat().st_mtime_ns
    assert model_for("vllm", "int8", "tiny", tmp_path, never) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == time
    with pytest.raises(ContestantError, match="llama has no converter"):
        model_for("llama", "fp32", "tiny", tmp_path, never)
    assert not list((tmp_path / "tiny").glob("gguf*"))


def comparison(precision: str, name: str, **rates: float) -> Comparison:
    return Comparison(config="c", precision=precision, cell=Cell(name, 1, 8, 8), rates=rates, spread={}, same_tokens={})


def test_rates_and_equal_tokens() -> None:
    cell = Cell("2 seq", 2, 5, 4)
    found = compare(
        "c",
        "fp32",
        cell,
        {
            "troupellm": Measured([1.0, 2.0, 4.0], [[1, 2, 3, 4], [5, 6, 7, 8]]),
            "vllm": Measured([8.0], [[1, 2, 9, 4], [5, 6, 7, 8]]),
        },
    )
    assert found.rates == {"troupellm": 4.0, "vllm": 1.0}
    assert found.spread["troupellm"] == (2.0, 8.0)
    assert found.same_tokens == {"vllm": 0.75}
    assert (found.best, found.ratio("vllm"), found.ratio("llama")) == ("vllm", 4.0, None)
    assert Cell("prefill", 1, 1024, 1).counted_tokens == 1024
    assert cell.counted_tokens == 8


def test_prompts_differ_between_rounds_and_are_the_same_for_all() -> None:
    cell = Cell("2 seq", 2, 5, 4)
    assert cell.prompts(100, "0 1") == cell.prompts(100, "0 1")
    assert cell.prompts(100, "0 1") != cell.prompts(100, "0 2")


def test_goals_beside_peers_are_judged_per_precision() -> None:
    slow = {"openvino": 1.0, "transformers": 1.0}
    found = [
        comparison("fp32", "1 seq", troupellm=90.0, vllm=45.0, llama=100.0, **slow),
        comparison("fp32", "prefill", troupellm=160.0, vllm=100.0, llama=80.0, **slow),
        comparison("int8", "1 seq", troupellm=10.0, openvino=20.0),
    ]
    verdicts = {verdict.what: verdict for verdict in judge(found)}
    assert verdicts["fp32: worst decoding cell / best peer"].found == pytest.approx(0.9)
    assert verdicts["fp32: worst decoding cell / best peer"].kept
    assert verdicts["fp32: worst prefill cell / best peer"].found == pytest.approx(1.6)
    assert verdicts["fp32: geometric mean / best peer"].found == pytest.approx(geometric_mean([0.9, 1.6]))
    assert verdicts["fp32: geometric mean / vllm"].found == pytest.approx(geometric_mean([2.0, 1.6]))
    assert not verdicts["int8: worst decoding cell / best peer"].kept
    assert "int8: geometric mean / vllm" not in verdicts
    assert "MISSED" in judgement(list(verdicts.values()))
    names = ("troupellm", "openvino", "vllm", "llama")
    assert line(found[0], names).split() == ["c", "fp32", "1", "seq", "90.0", "1.0", "45.0", "100.0", "llama", "0.90x"]
    assert "geometric mean against openvino 120.00x, vllm 1.79x, llama 1.34x, best of each cell 1.20x" in means(
        found, names
    )


def test_nothing_is_kept_while_a_number_is_missing() -> None:
    """A missing contestant might have been the best, and a cell where we failed has no ratio."""
    there = dict.fromkeys(("openvino", "vllm", "llama", "transformers"), 50.0)
    whole, empty = comparison("fp32", "1 seq", troupellm=100.0, **there), comparison("fp32", "8 seq", **there)
    assert all(one.kept for one in judge([whole]))
    assert not any(one.kept for one in judge([whole, empty, comparison("fp32", "prefill")]))
    verdicts = {
        one.what.split(": ")[1]: one for one in judge([comparison("fp32", "1 seq", troupellm=100.0, vllm=50.0)])
    }
    best, rival = verdicts["geometric mean / best peer"], verdicts["geometric mean / vllm"]
    assert (best.kept, best.peers, best.cells) == (False, ("vllm",), 1)
    assert best.missing == ("openvino", "llama", "transformers")
    assert (rival.kept, rival.peers, rival.missing) == (True, ("vllm",), ())
    text = judgement([best])
    assert "not shown   1 cells; vllm; numbers MISSING of openvino, llama, transformers" in text


def test_answers_that_are_not_ours_are_told() -> None:
    cell = Cell("1 seq", 1, 5, 4)

    def told(precision: str, answer: list[int]) -> str:
        found = {"troupellm": Measured([1.0], [[1, 2, 3, 4]]), "llama": Measured([1.0], [answer])}
        return line(compare("c", precision, cell, found), ("troupellm", "llama"))

    assert "same" not in told("fp32", [1, 2, 3, 4])
    assert told("fp32", [1, 2, 3, 9]).endswith("same tokens: llama 75%")
    assert "llama 0% DIFFERS EARLY" in told("fp32", [9, 2, 3, 4])
    assert told("int8", [9, 2, 3, 4]).endswith("llama 0%")


@pytest.mark.slow
def test_bench_offline_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both contestants of this environment give the same tokens; a peer that is missing is named and fails the run."""
    pytest.importorskip("transformers")
    result = tmp_path / "result.json"
    code = bench(
        "offline",
        "--configs",
        "tiny",
        "--precisions",
        "fp32",
        "--contestants",
        "troupellm",
        "transformers",
        "vllm",
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
        "--peers-dir",
        str(tmp_path / "none"),
        "--result-json",
        str(result),
    )
    report = json.loads(result.read_text())
    assert code == 1
    assert [cell["cell"]["name"] for cell in report["cells"]] == ["2 seq", "prefill"]
    assert all(set(cell["rates"]) == {"troupellm", "transformers"} for cell in report["cells"])
    assert all(cell["same_tokens"] == {"transformers": 1.0} for cell in report["cells"])
    assert "make peers" in report["failures"][0]
    assert "worst prefill cell" in capsys.readouterr().out
