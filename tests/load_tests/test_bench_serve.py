"""`bench serve` as a whole, against a server that may misbehave."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from troupellm.load_tests import cli

Fake = Any


def bench(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.command(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    return int(args.func(args))


def serve(server: Fake, folder: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    """Run a small load; gives exit code and detailed report."""
    code = bench(
        "serve",
        "--base-url",
        server.url,
        "--num-prompts",
        "6",
        "--random-input-len",
        "5",
        "--random-output-len",
        "4",
        "--ignore-eos",
        "--disable-tqdm",
        "--save-detailed",
        "--result-dir",
        str(folder),
        "--result-filename",
        "r.json",
        "--random-vocab-size",
        "300",
        "--ready-check-timeout-sec",
        "0",
        *argv,
    )
    return code, json.loads((folder / "r.json").read_text())


def test_completions_with_token_ids(fake_server: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = serve(fake_server, tmp_path, "--metadata", "note=x", "--html-report", "--goodput", "ttft:60000")
    assert code == 0
    assert (report["completed"], report["failed"], report["note"], report["model_id"]) == (6, 0, "x", "fake-model")
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (42, 24)
    assert report["output_lens"] == [4] * 6
    assert all(len(itls) == 3 for itls in report["itls"])
    assert report["request_goodput"] == report["request_throughput"]
    body = fake_server.bodies[0]
    assert len(body["prompt"]) == 5
    assert all(0 <= token < 300 for token in body["prompt"])
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert "Successful requests:                     6" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_chat_with_words_and_key(fake_server: Fake, tmp_path: Path) -> None:
    code, report = serve(
        fake_server,
        tmp_path,
        "--backend",
        "openai-chat",
        "--api-key",
        "secret",
        "--extra-body",
        '{"top_k": 1}',
        "--max-concurrency",
        "2",
        "--request-rate",
        "500",
        "--num-warmups",
        "2",
        "--ready-check-timeout-sec",
        "5",
    )
    assert (code, report["completed"], report["max_concurrent_requests"] <= 2) == (0, 6, True)
    assert len(fake_server.bodies) == 1 + 2 + 6
    body = fake_server.bodies[0]
    assert len(body["messages"][0]["content"].split()) == 5
    assert body["top_k"] == 1
    assert fake_server.headers[0]["authorization"] == "Bearer secret"
    assert "secret" not in (tmp_path / "r.json").read_text()


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("refuse", "HTTP 429: the waiting queue is full"),
        ("error_event", "error event: the worker died"),
        ("no_done", "short stream: ended without [DONE]"),
        ("too_few", "short stream: 3 of 4 tokens"),
        ("cut", "connection closed in the middle of the reply"),
        ("no_usage", "the stream carried no usage, so tokens cannot be counted"),
    ],
)
def test_every_kind_of_bad_stream_counts_as_failed(
    fake_server: Fake, tmp_path: Path, behaviour: str, error: str
) -> None:
    fake_server.behaviour = behaviour
    code, report = serve(fake_server, tmp_path)
    assert (code, report["completed"], report["failed"]) == (1, 0, 6)
    assert report["errors"] == [error] * 6


def test_first_request_must_work(fake_server: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.behaviour = "refuse"
    assert bench("serve", "--base-url", fake_server.url, "--disable-tqdm") == 1
    assert capsys.readouterr().err == "bench serve: the first request failed: HTTP 429: the waiting queue is full\n"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--host", "example.org"], 1, "example.org is not this machine"),
        (["--num-prompts", "1000000"], 2, "--num-prompts is at most"),
        (["--max-duration-sec", "1e9"], 2, "--max-duration-sec is at most"),
        (["--ramp-up-strategy", "linear"], 2, "needs --ramp-up-start-rps"),
        (["--dataset-name", "custom"], 1, "needs --dataset-path"),
        (["--port", "1", "--ready-check-timeout-sec", "0"], 1, "no server at http://127.0.0.1:1"),
        (["--host", "::1", "--port", "1", "--ready-check-timeout-sec", "0"], 1, "no server at http://[::1]:1"),
        (["--port", "99999"], 1, "http://127.0.0.1:99999 is not an http address: Port out of range"),
        (["--base-url", "ftp://localhost"], 1, "ftp://localhost is not an http address"),
    ],
)
def test_runs_that_cannot_start(argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("serve", *argv) == code
    assert message in capsys.readouterr().err


def test_no_prompt_of_the_run_was_asked_before_it(fake_server: Fake, tmp_path: Path) -> None:
    serve(fake_server, tmp_path, "--num-warmups", "3", "--ready-check-timeout-sec", "5")
    prompts = [tuple(body["prompt"]) for body in fake_server.bodies]
    assert len(set(prompts)) == len(prompts) == 1 + 3 + 6
    fake_server.bodies.clear()
    serve(fake_server, tmp_path)
    assert sorted(tuple(body["prompt"]) for body in fake_server.bodies) == sorted(prompts[4:])


def test_flags_of_vllms_bench_scripts_are_understood(fake_server: Fake, tmp_path: Path) -> None:
    words = ("--backend", "vllm", "--input-len", "7", "--output-len", "2", "--top-p", "0.5", "--top-k", "-1")
    words += ("--served-model-name", "other", "--header", "X-Note=a=b", "Authorization=Bearer own", "--append-result")
    for _ in range(2):
        code = bench(
            "serve",
            "--base-url",
            fake_server.url,
            "--num-prompts",
            "3",
            "--model",
            "mine",
            "--disable-tqdm",
            *words,
            "--ready-check-timeout-sec",
            "0",
            "--result-dir",
            str(tmp_path),
            "--result-filename",
            "r.json",
        )
        assert code == 0
    reports = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [(one["backend"], one["model_id"], one["total_output_tokens"]) for one in reports] == [
        ("vllm", "mine", 6)
    ] * 2
    body, headers = fake_server.bodies[0], fake_server.headers[0]
    assert (len(body["prompt"]), body["max_tokens"], body["model"]) == (7, 2, "other")
    assert (body["top_p"], body["top_k"]) == (0.5, -1)
    assert not {"min_p", "frequency_penalty"} & set(body)
    assert (headers["x-note"], headers["authorization"]) == ("a=b", "Bearer own")


@pytest.mark.parametrize(
    ("words", "ignored"),
    [((), True), (("--no-ignore-eos",), False), (("--dataset-name", "prefix_repetition"), False)],
)
def test_random_prompts_are_answered_to_the_wanted_length(
    fake_server: Fake, words: tuple[str, ...], ignored: bool
) -> None:
    fake_server.behaviour = "too_few"
    code = bench(
        "serve",
        "--base-url",
        fake_server.url,
        "--num-prompts",
        "2",
        "--output-len",
        "3",
        "--disable-tqdm",
        "--ready-check-timeout-sec",
        "0",
        *words,
    )
    assert code == int(ignored)
    assert [body.get("ignore_eos", False) for body in fake_server.bodies] == [ignored] * 2


def test_a_ramp_is_in_the_name_of_its_result(fake_server: Fake, tmp_path: Path) -> None:
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "500", "--ramp-up-end-rps", "1000")
    sizes = ("--num-prompts", "2", "--random-input-len", "5", "--random-output-len", "4", "--disable-tqdm")
    url = ("--base-url", fake_server.url, "--ready-check-timeout-sec", "0")
    assert bench("serve", *url, *sizes, *ramp, "--save-result", "--result-dir", str(tmp_path)) == 0
    (result,) = tmp_path.iterdir()
    assert result.name.startswith("openai-ramp-up-linear-500qps-1000qps-fake-model-")


def test_data_sets_from_files(fake_server: Fake, tmp_path: Path) -> None:
    custom = tmp_path / "prompts.jsonl"
    custom.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two"}\n')
    code, report = serve(
        fake_server, tmp_path, "--dataset-name", "custom", "--dataset-path", str(custom), "--custom-output-len", "2"
    )
    assert (code, report["output_lens"]) == (0, [3, 2] * 3)
    sharegpt = tmp_path / "s.json"
    turns = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "x" * 40}]
    sharegpt.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    code, report = serve(fake_server, tmp_path, "--dataset-name", "sharegpt", "--dataset-path", str(sharegpt))
    assert (code, report["output_lens"]) == (0, [10] * 6)
    assert fake_server.bodies[-1]["prompt"] == "question"


def test_prefix_groups_share_their_prefix(fake_server: Fake, tmp_path: Path) -> None:
    serve(
        fake_server,
        tmp_path,
        "--dataset-name",
        "prefix_repetition",
        "--prefix-repetition-prefix-len",
        "8",
        "--prefix-repetition-suffix-len",
        "2",
        "--prefix-repetition-num-prefixes",
        "2",
        "--prefix-repetition-output-len",
        "2",
    )
    prompts = [body["prompt"] for body in fake_server.bodies]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 6


def test_time_limit_ends_the_run(fake_server: Fake, tmp_path: Path) -> None:
    code, report = serve(fake_server, tmp_path, "--request-rate", "0.01", "--max-duration-sec", "0.2")
    assert (code, report["completed"], report["failed"]) == (1, 0, 6)
    assert set(report["errors"]) == {"not sent: the run's time limit"}
