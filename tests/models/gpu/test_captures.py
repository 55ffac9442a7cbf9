"""When graphs are captured, and which ones steps are computed with meanwhile."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from troupellm.models.gpu.device import CpuDevice, CpuEvent, Event, Graph
from troupellm.models.gpu.graph_dispatch import GraphKey
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.gpu.sampling_tensors import CUT, DRAWN
from troupellm.protocol.errors import GraphCaptureError
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt
from troupellm.tests.support.gpu.device_runner import check, device_runner, replay, script
from troupellm.tests.support.workers.plan_script import plain


def used_graphs(runner: CudaRunner, monkeypatch: pytest.MonkeyPatch) -> list[GraphKey]:
    """Those that steps are computed with from now on."""
    used, run = list[GraphKey](), runner.graphs.run
    monkeypatch.setattr(runner.graphs, "run", lambda key: used.append(key) or run(key))
    return used


def test_a_larger_graph_stands_in_until_a_step_has_its_own(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    told.decode(0, steps=6)
    runner = device_runner(llama)
    used = used_graphs(runner, monkeypatch)
    check(replay(runner, told.plans), told.results)
    assert used == [GraphKey(4), *[GraphKey(1)] * 5]
    assert runner.graphs.dispatcher.missing == 0


def test_tokens_are_drawn_from_the_logits_of_a_graph_that_does_not_draw(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that draws comes when a step has drawn."""
    told = script(llama)
    told.add(0, make_prompt(8), temperature=0.8, seed=5)
    told.add(1, make_prompt(5, 1))
    told.step({0: 8, 1: 5})
    told.decode(0, 1, steps=4)
    runner = device_runner(llama, (2,))
    used = used_graphs(runner, monkeypatch)
    check(replay(runner, told.plans), told.results)
    assert used == [GraphKey(2), *[GraphKey(2, kind=DRAWN)] * 3]
    while runner.idle():
        pass
    assert runner.graphs.dispatcher.captured == 2


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 9}, {"top_k": 9, "top_p": 0.8, "min_p": 0.01}], ids=str)
def test_what_draws_from_the_likeliest_tokens_is_replayed_whole(
    cut: dict[str, float], llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows that need less, and rows that pad; nothing is chosen behind its graph."""
    told = script(llama)
    told.add(0, make_prompt(8), temperature=0.8, seed=5, **cut)
    told.add(1, make_prompt(5, 1))
    told.add(2, make_prompt(6, 2), temperature=1.2, seed=6)
    told.step({0: 8, 1: 5, 2: 6})
    told.decode(0, 1, 2, steps=5)
    runner = device_runner(llama, (4,))
    used = used_graphs(runner, monkeypatch)
    eager, append = list[int](), runner.chooser.append
    monkeypatch.setattr(runner.chooser, "append", lambda *given: eager.append(given[2]) or append(*given))
    check(replay(runner, told.plans), told.results)
    assert used == [GraphKey(4), *[GraphKey(4, kind=CUT)] * 4]
    assert eager == [CUT] * 2  # of the prompts, and from the logits of the first graph


def test_captures_beside_steps_take_a_tenth_of_the_time(llama: Pair) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    told.decode(0, steps=60)
    looks = count()  # a second passes between two looks at the clock
    runner = device_runner(llama, (1, 2), clock=lambda: float(next(looks)))
    captured = []
    for plan in told.plans:
        runner.run(plan)
        captured.append(runner.graphs.dispatcher.captured)
    first, second = captured.index(1), captured.index(2)
    assert first == 1  # the first step that a graph is made for
    taken = runner.graphs.capture_seconds / 2
    assert taken >= 2.0
    assert second - first >= 9 * taken


def test_an_idle_runner_captures_part_by_part_and_then_is_done(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = device_runner(llama)
    parts = 0
    while runner.idle():
        parts += 1
        assert runner.graphs.dispatcher.captured == parts // 2
    assert parts == 6
    assert runner.graphs.dispatcher.missing == 0
    told = script(llama)
    told.add(0, make_prompt(8))
    told.add(1, make_prompt(5, 1))
    told.step({0: 8, 1: 5})
    told.decode(0, 1, steps=3)
    used = used_graphs(runner, monkeypatch)
    first, second = (runner.run(plan) for plan in told.plans[:2])
    assert first.graphs is not None
    assert (first.graphs.captured, first.graphs.missing) == (3, 0)
    assert first.graphs.seconds == runner.graphs.capture_seconds
    assert second.graphs is None  # nothing is new
    check([plain(first), plain(second), *replay(runner, told.plans[2:])], told.results)
    assert used == [GraphKey(2)] * 3


def test_a_step_may_come_between_the_parts_of_a_capture(llama: Pair) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    told.decode(0, steps=9)
    runner = device_runner(llama)
    results = []
    for plan in told.plans:
        ticket = runner.launch(plan)
        assert not runner.idle()  # a plan is under way
        results.append(plain(runner.collect(ticket)))
        runner.idle()
    check(results, told.results)


class Refusing(CpuDevice):
    """Captures some graphs, and no more."""

    def __init__(self, error: Exception, graphs: int = 0) -> None:
        self.error, self.left, self.refused = error, graphs, 0

    def capture(self, body: Callable[[], None]) -> Graph:
        if self.left:
            self.left -= 1
            return super().capture(body)
        self.refused += 1
        raise self.error


def test_a_capture_that_fails_meanwhile_fails_the_next_step(llama: Pair) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    runner = device_runner(llama, (4,), device=Refusing(RuntimeError("not permitted")))
    assert runner.idle()
    assert not runner.idle()
    assert not runner.idle()
    with pytest.raises(GraphCaptureError, match="a CUDA graph of 4 rows of 1 could not be captured") as caught:
        runner.launch(told.plans[0])
    assert str(caught.value.__cause__) == "not permitted"


class Faulty(CpuDevice):
    """Raises a fault when it is waited for, as GPUs do.

    Attributes:
        fault: of something that was launched.
    """

    fault: Exception | None = None

    def record(self) -> Event:
        return FaultyEvent(self)

    def capture(self, body: Callable[[], None]) -> Graph:
        self.record().wait()
        return super().capture(body)


class FaultyEvent(CpuEvent):
    def __init__(self, device: Faulty) -> None:
        self._device = device

    def wait(self) -> None:
        if self._device.fault is not None:
            raise self._device.fault


@pytest.mark.parametrize("warm", [False, True])
def test_no_capture_is_blamed_for_a_step_that_has_failed(warm: bool, llama: Pair) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    told.decode(0, steps=2)
    device = Faulty()
    runner = device_runner(llama, (1,), device=device)
    runner.run(told.plans[0])
    if warm:
        assert runner.idle()
    device.fault = RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        runner.launch(told.plans[1])


@pytest.mark.parametrize("later", [False, True])
def test_a_step_before_a_capture_that_fails_is_a_capture_that_fails(
    later: bool, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """later: the device tells when it is waited for."""
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    device, fault = Faulty(), RuntimeError("an illegal memory access")
    runner = device_runner(llama, (4,), device=device)
    decode = runner.graphs.decode

    def failing(*given: Any) -> tuple[Tensor, Tensor]:
        if not later:
            raise fault
        device.fault = fault
        return decode(*given)

    monkeypatch.setattr(runner.graphs, "decode", failing)
    assert not runner.idle()
    with pytest.raises(GraphCaptureError, match="could not be captured") as caught:
        runner.launch(told.plans[0])
    assert caught.value.__cause__ is fault


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("graphs", [0, 1])
def test_without_memory_for_more_graphs_steps_do_with_those_there_are(
    graphs: int, idle: bool, llama: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.add(1, make_prompt(5, 1), temperature=0.8, seed=5)
    told.step({0: 8, 1: 5})
    told.decode(0, 1, steps=3)
    told.step({0: 1}, freed_rows=(1,))
    told.decode(0, steps=3)
    device = Refusing(torch.OutOfMemoryError("none left"), graphs)
    runner = device_runner(llama, device=device)
    while idle and runner.idle():
        pass
    check(replay(runner, told.plans), told.results)
    assert device.refused == 1
    assert not runner.idle()
    report = runner.graphs.report()
    missing = 3 - graphs + (not idle)  # a step that draws has asked for one
    assert (report.captured, report.missing, report.given_up) == (graphs, 0, missing)
    (warning,) = [record for record in caplog.records if record.name == "troupellm.worker"]
    assert f"the {missing} that are missing are not captured" in warning.getMessage()


def test_grown_rows_without_memory_capture_no_further_graph(llama: Pair) -> None:
    device = Refusing(torch.OutOfMemoryError("none left"), 1)
    runner = device_runner(llama, device=device)
    while runner.idle():
        pass
    device.left = 10
    runner.rows.generation += 1
    assert not runner.idle()
    assert (runner.graphs.dispatcher.captured, device.refused) == (0, 1)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("none left"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_want_of_memory_before_a_capture_is_no_other(
    error: Exception, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are computed before it, which take memory, too, and so do their kernels."""
    runner = device_runner(llama)

    def none_left(*_: object) -> None:
        raise error

    monkeypatch.setattr(runner.graphs, "decode", none_left)
    assert runner.idle()
    assert not runner.idle()
    runner.check()
    assert runner.graphs.dispatcher.given_up == 3


def test_what_has_no_graphs_says_so_once(llama: Pair) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    told.decode(0, steps=2)
    runner = device_runner(llama, ())
    first, *others = [runner.run(plan).graphs for plan in told.plans]
    assert first is not None
    assert (first.captured, first.missing) == (0, 0)
    assert not any(others)


def test_a_graph_that_is_repeated_changes_nothing(llama: Pair) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    told.decode(0, steps=6)
    runner = device_runner(llama)
    with pytest.raises(RuntimeError, match="no step had a graph yet"):
        runner.graphs.repeat(1)
    runner.idle()
    before = replay(runner, told.plans[:4])
    with torch.inference_mode():
        assert runner.graphs.repeat(3) > 0.0
    check(before + replay(runner, told.plans[4:]), told.results)
