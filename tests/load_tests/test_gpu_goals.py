"""The GPU script's measures of engines, each run once on a tiny model and a CPU, which may pass for a GPU."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from troupellm.load_tests.gpu import (
    beside,
    captures,
    clocks,
    drafts,
    engine as engine_measures,
    engines,
    first_tokens,
    gaps,
    goals,
    guided,
    idling,
    memory,
    prefixes,
    restoring,
    workloads,
)
from troupellm.load_tests.gpu.engine import Found, Models
from troupellm.load_tests.kv_cache.throughput import Load
from troupellm.load_tests.peers.servers import ServerPlan
from troupellm.load_tests.roofline import SIZES
from troupellm.models.gpu.launched_step import LaunchedPlan
from troupellm.models.gpu.runner import CudaRunner
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import StepPlan
from troupellm.server.cli.flags import add_config_flags, load_configs, translate
from troupellm.tests.support.gpu.gpu_models import CPU, tiny_models
from troupellm.tests.support.gpu.pretended_gpu import pretend_gpu

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


def test_public_requests_are_those_of_the_benchmark(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = workloads.public_lengths()
    assert [sum(column) for column in zip(*lengths, strict=True)] == [142_827, 133_966]
    monkeypatch.setattr(workloads, "PUBLIC", 3)
    monkeypatch.setattr(workloads, "PUBLIC_LENGTHS", (3, 9))
    details = checked("G6", workloads.public(models))
    assert details["requests"] == 3
    assert details["missing_graphs"] == 0
    assert details["tokens/s"] > 0


@pytest.mark.parametrize(("goal", "measure"), [("G7", workloads.equal), ("G7b", workloads.saturated)])
def test_rates_of_equal_requests_follow_from_their_times(
    models: Models, monkeypatch: pytest.MonkeyPatch, goal: str, measure: Any
) -> None:
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


def test_idle_shares_are_read_from_the_profile(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_captures_of_all_sizes_are_counted(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "CONTEXT", 32)
    details = checked("G17", captures.all_sizes(models))
    assert details["graphs"] == len(SIZES_OF_GRAPHS)


def test_no_graphs_are_no_number(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "CONTEXT", 32)
    with pytest.raises(RuntimeError, match="no graph to capture"):
        captures.all_sizes(models)


def test_a_cached_prompt_is_compared_with_a_cold_one(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "KILO", 32)
    monkeypatch.setattr(prefixes, "ROUNDS", 1)
    details = checked("G18", prefixes.hit(models))
    assert details["cached tokens"] == 8 * 32 - 1
    assert details["cached ms"] > 0
    assert details["cold ms"] > 0


def test_a_common_prefix_is_read_once_by_its_readers(
    gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_kept_drafts_are_counted_in_the_speed_up(gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONTEXT", 16), ("STEPS", 12), ("BATCHES", (1, 3)), ("ANSWER", 12), ("ROUNDS", 1)):
        monkeypatch.setattr(drafts, name, value)
    found, details = drafts.verified(models)
    details = checked("G20", ({name.replace(" 3", " 32"): value for name, value in found.items()}, details))
    assert 1.0 < details["speed-up, batch 1"]["tokens kept"] <= 5.0


def test_guided_answers_are_launched_ahead_of_their_choice(
    gpu: None, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step under way whose choice is still to be made while the next one is launched."""
    ahead, launch = list[bool](), CudaRunner.launch

    def launched(self: CudaRunner, plan: StepPlan) -> LaunchedPlan:
        ticket = launch(self, plan)
        if ticket.guided:
            ahead.append(ticket.choice is not None)
        return ticket

    monkeypatch.setattr(CudaRunner, "launch", launched)
    for name, value in (("ANSWER", 24), ("ROUNDS", 1), ("BATCHES", (1, 3))):
        monkeypatch.setattr(guided, name, value)
    found, details = guided.per_token(models)
    details = checked("G21", ({name.replace(" 3", " 32"): value for name, value in found.items()}, details))
    for part in details.values():
        assert part["ms"] > 0
        assert part["runs"] == 1
        assert min(part["tokens at once"], part["without, tokens at once"]) >= 1.0
    assert sum(ahead) > len(ahead) / 4  # here steps are done at once, and often collected before the next one


def test_first_tokens_are_measured_against_a_started_server(
    models: Models, monkeypatch: pytest.MonkeyPatch, fake_server: Any
) -> None:
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


@pytest.mark.slow
def test_transformers_is_measured_in_inference_mode(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the session asks: in inference mode, where its thread would fail. Here it has no graphs."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(beside, "CONTEXT", 16)
    monkeypatch.setattr(beside, "STEPS", 6)
    monkeypatch.setattr(beside, "ROUNDS", 1)
    small = {"num_blocks": 64, "max_batch_tokens": 256}  # else it takes most of the machine's memory
    ways = {told: settings | small for told, settings in beside.BATCHING.items()}
    monkeypatch.setattr(beside, "BATCHING", ways)
    monkeypatch.setattr(Models, "engine_step", lambda *_: 1e-3)
    monkeypatch.setattr(Models, "engine_details", lambda *_: {})
    with torch.inference_mode():
        details = checked("G16", beside.beside_transformers(models))["8b generate_batch 32"]
    assert details["transformers"]["its own choice"]["graphs"] == "(False, False)"
    assert "device.type = 'cpu'" in details["transformers"]["async and graphs"]
    assert list(details["transformers tokens/s"]) == ["its own choice"]


class Manager:
    """Answers in the place of `transformers`' own, with a word too few."""

    def __init__(self, error: str | None = None) -> None:
        self._error, self._asked = error, list[int]()

    def add_requests(self, inputs: list[list[int]], max_new_tokens: int) -> None:
        self._asked = [max_new_tokens] * (len(inputs) - 1)

    def get_result(self, timeout: float) -> Any:
        if not self._asked:
            return None
        tokens = [0] * (self._asked.pop() if self._error is None else 0)
        return SimpleNamespace(is_finished=lambda: True, error=self._error, generated_tokens=tokens)

    def is_running(self) -> bool:
        return False


def test_a_peer_that_gives_less_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="1 of 3 answers did not come"):
        beside.answer_all(Manager(), [[1]] * 3, 5)
    with pytest.raises(RuntimeError, match="0 tokens came of 5: an inference tensor"):
        beside.answer_all(Manager("an inference tensor"), [[1]] * 3, 5)
    seconds = iter([9.0, 3.0, 1.0, 5.0, 2.0, 4.0, 2.0])  # two of the rounds are 2 s longer for two tokens
    assert beside.rate_of(lambda tokens: next(seconds), 32, 2) == 32.0


def test_the_cache_may_fill_the_device(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's settings limit it by nothing but memory, and steps go before its number counts."""
    free, seen = [80 * 2**30, 2**30], list[tuple[EngineConfig, int]]()
    own = SIZES["qwen3-8b"].kv_numbers * 2 * engine_measures.BLOCK_SIZE
    ready = SimpleNamespace(num_blocks=60 * 2**30 // own, block_size=engine_measures.BLOCK_SIZE, weight_bytes=2**34)

    class Worker:
        def __init__(self, folder: Path, config: EngineConfig) -> None:
            self.ready = ready
            seen.append((config, 0))

        def fill(self, batch: int, context: int, steps: int) -> None:
            seen.append((seen[-1][0], batch * context))

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    monkeypatch.setattr(engine_measures, "BareWorker", Worker)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free.pop(0), 0))
    details = checked("G25", found := memory.cache_share(models))
    assert found[0]["share"] == pytest.approx(60 / 64, rel=1e-3)
    assert details["still free GiB"] == 1.0
    (config, _), (_, prompts) = seen
    assert config.cache.gpu_memory_utilization == 1.0
    assert config.cache.num_gpu_blocks_override is None
    assert prompts == config.scheduler.max_num_batched_tokens == config.scheduler.max_num_prefill_tokens
    wanted = 2 * real_kv_numbers() * config.scheduler.max_num_seqs * int(config.model.max_model_len)
    assert wanted > 2 * 141e9  # of the larger of the two devices


def real_kv_numbers() -> int:
    """Of a token of 8B, which is a tiny model here."""
    return 2 * 36 * 8 * 128


def test_clocks_are_read_beside_work(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = list[object]()
    monkeypatch.setattr(clocks, "SIDE", 8)
    monkeypatch.setattr(torch.cuda, "synchronize", worked.append)
    monkeypatch.setattr(clocks, "QUERY", ("sh", "-c", "sleep 0.2; echo 1980 MHz, 3201 MHz"))
    assert clocks.clocks_under_load(CPU) == "1980 MHz, 3201 MHz"
    assert len(worked) > 1
    monkeypatch.setattr(clocks, "QUERY", ("no-such-program",))
    assert clocks.clocks_under_load(CPU) == "unknown: FileNotFoundError"
    monkeypatch.setattr(clocks, "QUERY", ("sh", "-c", "exit 9"))
    assert clocks.clocks_under_load(CPU) == "unknown: nvidia-smi failed"
