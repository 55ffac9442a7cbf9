"""The GPU script's measures of engines, each run once on a tiny model and a CPU, which may pass for a GPU."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_models import tiny_models
from tests.support.pretended_gpu import pretend_gpu
from troupellm.load_tests.gpu import (
    captures,
    drafts,
    engines,
    first_tokens,
    gaps,
    goals,
    guided,
    idling,
    prefixes,
    restoring,
    workloads,
)
from troupellm.load_tests.gpu.engine import Found, Models
from troupellm.load_tests.offload.throughput import Load
from troupellm.load_tests.peers.servers import ServerPlan
from troupellm.load_tests.roofline import SIZES
from troupellm.server.cli.flags import add_config_flags, load_configs, translate

SIZES_OF_GRAPHS = (1, 2, 4)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Models:
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.0)
    return tiny_models(monkeypatch, tmp_path)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are graphs."""
    pretend_gpu(monkeypatch, SIZES_OF_GRAPHS)


def checked(goal: str, measured: Found) -> dict[str, Any]:
    """The details of a measure, all of whose numbers are there."""
    found, details = measured
    assert set(found) == {target.name for target in goals.GOALS[goal].targets}
    assert all(isinstance(value, float) for value in found.values())
    result = goals.judged(goal, found, details)
    assert "SKIPPED" not in goals.text(result)
    return details


def test_public_requests(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = workloads.public_lengths()
    assert [sum(column) for column in zip(*lengths, strict=True)] == [142_827, 133_966]
    monkeypatch.setattr(workloads, "PUBLIC", 3)
    monkeypatch.setattr(workloads, "PUBLIC_LENGTHS", (3, 9))
    details = checked("G6", workloads.public(models))
    assert details["requests"] == 3
    assert details["missing_graphs"] == 0
    assert details["tokens/s"] > 0


@pytest.mark.parametrize(("goal", "measure"), [("G7", workloads.equal), ("G7b", workloads.saturated)])
def test_equal_requests(models: Models, monkeypatch: pytest.MonkeyPatch, goal: str, measure: Any) -> None:
    monkeypatch.setattr(workloads, "KILO", 4)
    monkeypatch.setattr(workloads, "MANY", 4)
    monkeypatch.setattr(workloads, "SATURATING", 3)
    details = checked(goal, measure(models))
    for name, part in details.items():
        tokens = 4 * int(name[0]) * part["requests"]
        assert part["tokens/s"] == pytest.approx(tokens / part["s"])
        assert part["roofline tokens/s"] == pytest.approx(tokens / part["roofline s"])


def test_long_workloads_have_fewer_requests(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def run(models: Models, name: str, lengths: workloads.Lengths, *_: object, **more: Any) -> workloads.Ran:
        ran.append(len(lengths))
        return workloads.Ran(1.0, 10**9, 0, 0)

    monkeypatch.setattr(workloads, "_run", run)
    monkeypatch.setattr(workloads, "KILO", 4)
    monkeypatch.setattr(workloads, "MANY", 8)
    whole = workloads.workload_seconds(SIZES["qwen3-8b"], workloads.BF16, models.roof(), [(16, 16)] * 8)
    monkeypatch.setattr(workloads, "LONGEST", whole / 2)
    workloads.equal(models)
    assert ran == [8, 4]


def test_idle_shares(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BATCH", 2), ("CONTEXT", 8), ("BEFORE", 2), ("STEPS", 6), ("SPARE", 16)):
        monkeypatch.setattr(idling, name, value)
    monkeypatch.setattr(idling, "intervals", lambda profile: [(0.0, 9.0), (10.0, 13.0), (12.0, 14.0), (15.0, 20.0)])
    details = checked("G12", idling.idle_shares(models))
    assert details["8b"]["kernels and copies"] == 3
    assert details["8b"]["with gaps within steps"] == 0.1


def test_gaps_within_steps_are_no_idling() -> None:
    worked = [(0.0, 1.0), (1.0 + 2e-6, 2.0), (2.5, 3.0), (2.6, 2.9), (3.0, 4.0)]
    assert idling.idle_share(worked, idling.WITHIN) == pytest.approx(0.125)
    assert idling.idle_share(worked, 0.0) == pytest.approx(0.5000020 / 4)
    with pytest.raises(RuntimeError, match="nothing that the device did"):
        idling.steady([])


def test_captures(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "CONTEXT", 32)
    details = checked("G17", captures.all_sizes(models))
    assert details["graphs"] == len(SIZES_OF_GRAPHS)


def test_no_graphs_are_no_number(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "CONTEXT", 32)
    with pytest.raises(RuntimeError, match="no graph to capture"):
        captures.all_sizes(models)


def test_a_cached_prompt(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "KILO", 32)
    monkeypatch.setattr(prefixes, "ROUNDS", 1)
    details = checked("G18", prefixes.hit(models))
    assert details["cached ms"] < details["cold ms"]


def test_a_common_prefix(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("KILO", 8), ("READERS", 3), ("STEPS", 12)):
        monkeypatch.setattr(prefixes, name, value)
    details = checked("G24", prefixes.common(models))
    assert details["read by each, roofline ms"] > details["without, roofline ms"]


def test_coming_back_from_the_host(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "PREFIX", 512)
    monkeypatch.setattr(restoring, "ROUNDS", 1)
    monkeypatch.setattr(restoring, "LOAD", Load(requests=3, prompt_len=40, output_len=3))
    monkeypatch.setattr(restoring, "LOAD_ROUNDS", 1)
    details = checked("G19", restoring.from_host(models))
    assert details["tokens restored"] >= 512 - 32
    assert details["blocks stored"] > 0
    assert details["tokens hit"] == 0


def test_verified_drafts(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONTEXT", 16), ("STEPS", 12), ("BATCHES", (1, 3)), ("ANSWER", 12), ("ROUNDS", 1)):
        monkeypatch.setattr(drafts, name, value)
    found, details = drafts.verified(models)
    details = checked("G20", ({name.replace(" 3", " 32"): value for name, value in found.items()}, details))
    assert 1.0 < details["speed-up, batch 1"]["tokens kept"] <= 5.0


def test_guided_answers(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "ANSWER", 8)
    monkeypatch.setattr(guided, "ROUNDS", 1)
    details = checked("G21", guided.per_token(models))
    assert details["batch 1"]["ms"] > 0


def test_first_tokens(models: Models, monkeypatch: pytest.MonkeyPatch, fake_server: Any) -> None:
    told: list[list[str]] = []

    class Started:
        """In the place of a server's process."""

        url = fake_server.url

        def __init__(self, plan: ServerPlan, log: Path) -> None:
            told.append(plan.command[plan.command.index("serve") + 2 :])

        def wait_ready(self, timeout: float) -> None:
            """It is."""

        def close(self) -> None:
            """Others do that."""

    monkeypatch.setattr(first_tokens, "ServerProcess", Started)
    monkeypatch.setattr(first_tokens, "PROMPTS", {"128": 2, "1k": 4, "8k": 8})
    monkeypatch.setattr(first_tokens, "ROUNDS", 1)
    details = checked("G26", first_tokens.idle_server(models))
    assert details["8k"]["roofline ms"] > details["128"]["roofline ms"]
    assert [len(body["prompt"]) for body in fake_server.bodies] == [2, 2, 4, 4, 8, 8]
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    engine, _ = load_configs(parser.parse_args(translate(told[0])), {})
    assert (engine.model.dtype, engine.model.load_format) == ("bfloat16", "dummy")
    assert engine.scheduler.max_num_seqs == 1
    assert not engine.cache.enable_prefix_caching


def test_gaps_while_prompts_come(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("STREAMS", 2), ("CONTEXT", 8), ("PROMPT", 48), ("PROMPTS", 2), ("EVERY_SECONDS", 0.05), ("CHUNK", 16),
        ("LONGEST_ANSWER", 400),
    ):  # fmt: skip
        monkeypatch.setattr(gaps, name, value)
    details = checked("G27", gaps.while_prompts_come(models))
    assert details["p99 ms"] >= details["p50 ms"] > 0
