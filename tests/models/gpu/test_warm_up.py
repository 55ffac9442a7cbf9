"""The steps that a GPU's worker runs before its first request, and the progress that it reports."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tensor_attention import plan_tensors
from tests.support.tiny_model import write_tiny_model
from troupellm.actors.scheduler.prefill_budget import PrefillBudget
from troupellm.models.gpu import placement, warm_up
from troupellm.models.gpu.cuda_graphs import DecodeGraphs
from troupellm.models.gpu.graph_dispatch import Dispatcher, GraphKey
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.gpu.sampling_tensors import CUT, DRAWN
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig, SchedulerConfig
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink, StepPlan, WorkerReady

SIZE, LENGTH, TOKENS = 16, 64, 1024
Load = Callable[..., tuple[WorkerReady, list[StepPlan]]]


@pytest.fixture
def load(tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Loads a worker whose runners take a fixed time for a token, and a minute for each first step."""
    write_tiny_model(tmp_path)
    now, plans, workers = [0.0], list[StepPlan](), list[ModelWorker]()
    run = CudaRunner.run

    def timed(self: CudaRunner, plan: StepPlan) -> Any:
        now[0] += 1e-5 * sum(plan.counts) + (0.0 if plans else 60.0)
        plans.append(plan)
        return run(self, plan)

    def loaded(progress: ProgressSink = lambda progress: None, **settings: Any) -> tuple[WorkerReady, list[StepPlan]]:
        common = {"max_model_len": LENGTH, "block_size": SIZE, "max_num_seqs": 6, "max_num_batched_tokens": TOKENS}
        config = EngineConfig.from_flat({"model": str(tmp_path), **common, **settings})
        workers.append(ModelWorker(tmp_path))
        return workers[-1].load(config, progress), plans

    monkeypatch.setattr(CudaRunner, "run", timed)
    monkeypatch.setattr(warm_up, "perf_counter", lambda: now[0])
    yield loaded
    for worker in workers:
        worker.close()


def test_a_slow_first_step_does_not_make_later_ones_small(load: Load) -> None:
    """The time of compiling does not count: prompts get all of a step, and a token's time is that of later steps."""
    ready, _ = load()
    assert ready.saturation_tokens == TOKENS
    assert ready.saturation_seconds == pytest.approx(1e-5 * TOKENS)
    budget = PrefillBudget(SchedulerConfig(max_num_batched_tokens=TOKENS), ready)
    assert budget.tokens(0, streaming=False) == budget.tokens(0, streaming=False, alone=True) == TOKENS
    assert budget.seconds_per_token() == pytest.approx(1e-5)


def test_steps_of_every_size_and_kind_are_run(load: Load) -> None:
    _, plans = load()
    lone = {plan.counts[0] for plan in plans if len(plan.rows) == 1}
    assert {1, 2, 4, 8, 16, 32, 64} <= lone
    assert {len(plan.rows) for plan in plans if set(plan.counts) == {1}} == {1, 2, 4, 6}
    kinds = [row.sampling for plan in plans for row in plan.new_rows]
    assert all(kind in kinds for kind in warm_up.KINDS)


def test_every_step_that_may_compile_is_told_before_it(load: Load) -> None:
    """A seat that waits for a successor gives it up when it is silent for long."""
    told, tellers = list[int](), list[LoadProgress]()

    def progress(report: LoadProgress) -> None:
        told.append(len(plans))
        tellers.append(report)

    _, plans = load()
    plans.clear()
    load(progress)
    assert set(range(1, len(plans) - warm_up.TIMED)) <= set(told)
    steps = [report for report in tellers if report.phase == "warm_up" and report.total > 1]
    assert [report.done for report in steps] == list(range(steps[0].total))


def test_what_is_asked_for_bounds_prompts_all_the_same(load: Load) -> None:
    ready, _ = load(max_num_prefill_tokens=32)
    config = SchedulerConfig(max_num_batched_tokens=TOKENS, max_num_prefill_tokens=32)
    assert PrefillBudget(config, ready).tokens(0, streaming=False) == 32


def test_the_smallest_cache_is_warmed_up_within_it(load: Load) -> None:
    ready, plans = load(num_gpu_blocks_override=1, max_model_len="auto")
    assert ready.max_model_len == SIZE
    assert max(max(plan.counts) for plan in plans[1:]) == SIZE


def test_graphs_are_captured_by_nobody_but_who_replays_them(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels are compiled: each kind runs once before the first request."""
    monkeypatch.setattr(
        placement, "plan_attention", lambda *_, **__: SimpleNamespace(backend=SimpleNamespace(name="triton"))
    )
    monkeypatch.setattr(placement, "triton_planner", lambda *_, **__: plan_tensors)
    captured, warmed = list[GraphKey](), list[GraphKey]()
    capture, body = DecodeGraphs._capture, DecodeGraphs._warm_up
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self, key: captured.append(key) or capture(self, key))
    monkeypatch.setattr(DecodeGraphs, "_warm_up", lambda self, key: warmed.append(key) or body(self, key))
    told = list[int]()
    load(lambda _: told.append(len(warmed)))
    assert not captured
    assert warmed == [GraphKey(1), GraphKey(1, kind=DRAWN), GraphKey(1, kind=CUT)]
    assert {0, 1, 2} <= set(told)
    load(enforce_eager=True)
    assert len(warmed) == 3


def test_kinds_of_graphs() -> None:
    drafting = Dispatcher((2, 8), queries=(1, 4), draws=False)
    assert set(drafting.kinds) == {GraphKey(2), GraphKey(2, 4)}
    assert not Dispatcher(()).kinds


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)  # fmt: skip
def test_powers_of_two(most: int, sizes: list[int]) -> None:
    assert warm_up.powers_of_two(most) == sizes
