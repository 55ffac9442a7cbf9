"""An engine as a guest: it holds up no loop of its host, and a call from the wrong place is told so at once."""

import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest

from troupellm import Engine, WrongEventLoop
from troupellm.actors.output.detokenizer import TextTables
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer

MOST_HELD_MS = 20.0
HOST_LOOP = "troupellm.tests.support.engines.host_loop"


def host_says(case: str, model: Path) -> Any:
    """The report of a fresh process; see `host_loop`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", HOST_LOOP, case, str(model)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow  # a time of one machine: `bench heartbeat` measures it
def test_the_first_engine_of_a_process_holds_its_loop_for_20_ms_at_most(model_folder: Path) -> None:
    held = host_says("held", model_folder)
    assert max(held.values()) <= MOST_HELD_MS, held


def test_an_engine_that_is_first_named_in_a_running_loop_is_imported_on_a_thread(model_folder: Path) -> None:
    assert host_says("late", model_folder) == {
        "before": [True, False],
        "same": True,
        "answers": True,
        "state": "stopped",
        "refused": "max_seqs",
        "is_engine": True,
        "imported_now": True,
    }


def test_a_class_that_is_not_imported_yet_has_subclasses_and_attributes(model_folder: Path) -> None:
    assert host_says("inherited", model_folder) == {"is_mine": True, "config": True}


def test_a_fork_hears_that_engines_live_in_its_parent_and_ends_nothing_of_them(model_folder: Path) -> None:
    assert host_says("forked", model_folder) == {
        "engine": "WrongEventLoop",
        "llm": "WrongEventLoop",
        "left": "nothing",
    }


@pytest.mark.anyio
async def test_a_start_builds_tokenizer_template_and_text_tables_off_the_hosts_loop(
    model_folder: Path, fake_worker: Any
) -> None:
    built = {Tokenizer.load.__code__: "", ChatTemplate.load.__code__: "", TextTables.__init__.__code__: ""}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in built:
            built[frame.f_code] = threading.current_thread().name

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        async with Engine(model_folder, worker=lambda folder: fake_worker):
            pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert all(built.values())
    assert threading.current_thread().name not in built.values()


async def _stream(engine: Engine) -> None:
    async with engine.stream("hello"):
        pass


CALLS: dict[str, Callable[[Engine], Awaitable[object]]] = {
    "generate": lambda engine: engine.generate("hello"),
    "stream": _stream,
    "render": lambda engine: engine.render("hello"),
    "pause": lambda engine: engine.pause(),
    "abort_all": lambda engine: engine.abort_all(),
    "drain": lambda engine: engine.drain(1.0),
    "wait_failed": lambda engine: engine.wait_failed(),
    "aclose": lambda engine: engine.aclose(),
}


@pytest.mark.anyio
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_a_call_from_another_loop_is_told_so_at_once(
    model_folder: Path, fake_worker: Any, anyio_backend: object, backend: str
) -> None:
    async with Engine(model_folder, worker=lambda folder: fake_worker) as engine:
        for name, call in CALLS.items():
            with pytest.raises(WrongEventLoop):
                await anyio.to_thread.run_sync(partial(anyio.run, call, engine, backend=backend))
            assert engine.state == "ready", name
        assert (await engine.generate([5], max_tokens=2)).usage.completion_tokens == 2


async def _entered(model: Path) -> None:
    async with Engine(model):
        pass


@pytest.mark.parametrize("start", [_entered, Engine.open])
def test_an_engine_is_refused_under_trio(model_folder: Path, start: Callable[[Path], Awaitable[object]]) -> None:
    with pytest.raises(WrongEventLoop, match="asyncio"):
        anyio.run(start, model_folder, backend="trio")
