"""Row F8 of the fault table: adapters that cannot be served, and loads at a bad moment. Nothing else notices them."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import troupellm
from troupellm.models.worker.memory_use import resident_bytes
from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.servers.serving import eventually, running_server, server_config

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer root-key"}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ASK = {"prompt": "once", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    write_tiny_adapter(tmp_path / "loras" / "good", 1)
    write_tiny_adapter(tmp_path / "loras" / "bad", 2)
    return tmp_path / "loras"


@pytest.fixture
def engine_of(tiny_engine: Any, loras: Path) -> Callable[..., Any]:
    return partial(tiny_engine, enable_lora=True, max_loras=2, lora_dir=[str(loras)])


def changed_tensor(folder: Path, change: Callable[[np.ndarray], np.ndarray], *, name: str = "") -> None:
    tensors = load_file(folder / WEIGHTS)
    old = next(iter(tensors))
    tensors[name or old] = np.ascontiguousarray(change(tensors.pop(old)))
    save_file(tensors, folder / WEIGHTS)


def setting(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))


def replaced(folder: Path, make: Callable[[Path], object], name: str = WEIGHTS) -> None:
    (folder / name).unlink()
    make(folder / name)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: os.truncate(folder / WEIGHTS, 900), WEIGHTS),
    "empty": (lambda folder: os.truncate(folder / WEIGHTS, 0), WEIGHTS),
    "of another shape": (lambda folder: changed_tensor(folder, lambda tensor: tensor[:, :-1]), "shape"),
    "not a number": (lambda folder: changed_tensor(folder, lambda tensor: tensor * np.float32("nan")), "NaN"),
    "for a layer that is not there": (
        lambda folder: changed_tensor(
            folder, lambda tensor: tensor, name="base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
        ),
        "layers.9",
    ),
    "of a base of another size": (lambda folder: write_tiny_adapter(folder, 3, hidden=64), "shape"),
    "of too large a rank": (lambda folder: write_tiny_adapter(folder, 3, rank=64), "--max-lora-rank 64"),
    "without weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "without settings": (lambda folder: (folder / CONFIG).unlink(), CONFIG),
    "with settings that are none": (lambda folder: (folder / CONFIG).write_text("[" * 100_000), CONFIG),
    "of a method that is not served": (lambda folder: setting(folder, use_qalora=True), "use_qalora"),
    "a pipe": (lambda folder: replaced(folder, os.mkfifo), WEIGHTS),
    "a link out": (lambda folder: replaced(folder, lambda path: path.symlink_to("/etc/hostname")), WEIGHTS),
}


async def tokens(client: httpx.AsyncClient, model: str) -> list[int]:
    response = await client.post("/v1/completions", json=ASK | {"model": model})
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


async def test_F8_adapters_that_cannot_be_served_are_refused_by_a_sentence(engine_of: Any, loras: Path) -> None:
    config = server_config(admin_api_key=("root-key",))
    async with engine_of() as engine, running_server(engine, config) as served, served.client() as client:
        before = [await tokens(client, model) for model in ("tiny", "good")]
        for what, (harm, said) in BAD.items():
            folder = write_tiny_adapter(loras / f"bad-{what.replace(' ', '-')}", 2)
            harm(folder)
            for _ in range(2):
                body = {"lora_name": "new", "lora_path": folder.name}
                refused = await client.post("/v1/load_lora_adapter", headers=ADMIN, json=body)
                message = refused.json()["error"]["message"]
                assert refused.status_code == 400, (what, message)
                assert said in message, (what, message)
                assert str(loras.parent) not in message, what
                assert "\n" not in message, what
            asked = await client.post("/v1/completions", json=ASK | {"model": folder.name})
            assert asked.status_code in (400, 404), (what, asked.text)
            assert [await tokens(client, model) for model in ("tiny", "good")] == before, what
        assert [info.name for info in engine.adapters if "bad" not in info.name] == ["good"]


async def test_F8_load_calls_read_nothing_elsewhere_and_take_no_odd_names(engine_of: Any) -> None:
    paths = ("../../etc", "/etc", "good/../../..", "nothing", "", "a\0b", "x" * 100_000)
    names = ("tiny", "../good", "/good", "a b", "", "x" * 129, "ä")
    bodies = [("lora_path", {"lora_name": "new", "lora_path": path}) for path in paths]
    bodies += [("lora_name", {"lora_name": name, "lora_path": "good"}) for name in names]
    wrong = {"lora_name": (5, None, [], {}), "lora_path": (5, None, ["good"]), "load_inplace": ("yes", 1, None)}
    wrong |= {"base_model_name": (5, {}), "lora_int_id": ("x", 1.5)}
    right = {"lora_name": "new", "lora_path": "good"}
    bodies += [(param, right | {param: value}) for param, values in wrong.items() for value in values]
    config = server_config(admin_api_key=("root-key",))
    async with engine_of() as engine, running_server(engine, config) as served, served.client() as client:
        for param, body in bodies:
            route = "/v1/unload_lora_adapter" if param == "lora_int_id" else "/v1/load_lora_adapter"
            refused = await client.post(route, headers=ADMIN, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), body
            assert len(refused.text) < 500


async def test_F8_no_folder_is_listed_however_many_files_it_has(engine_of: Any, loras: Path) -> None:
    """Neither for a name that is there nor for unknown ones."""
    for number in range(300):
        (loras / "good" / f"{number}").touch()
    listed: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event in ("os.listdir", "os.scandir", "glob.glob") and str(loras) in str(arguments):
            listed.append(f"{event} {arguments}")

    sys.addaudithook(watch)
    try:
        async with engine_of() as engine:
            await engine.generate([5, 6], adapter="good", **GREEDY)
            await engine.load_adapter("mine", "good", below_lora_dir=True)
            for number in range(20):
                with pytest.raises(troupellm.ModelNotFound):
                    await engine.generate([5, 6], adapter=f"unknown-{number}", **GREEDY)
    finally:
        watching = False
    assert listed == []


async def test_F8_a_bad_adapter_below_lora_dir_costs_its_own_requests_alone(engine_of: Any, loras: Path) -> None:
    changed_tensor(loras / "bad", lambda tensor: tensor * np.float32("inf"))
    async with engine_of() as engine:
        alone = [await engine.generate([5, 6], adapter=name, **GREEDY) for name in ("", "good")]
        answers: dict[int, Any] = {}

        async def ask(number: int, name: str) -> None:
            try:
                answers[number] = (await engine.generate([5, 6], adapter=name, **GREEDY)).token_ids
            except troupellm.TroupeError as error:
                answers[number] = error

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(ask, number, ("", "good", "bad")[number % 3])
        for number, answer in answers.items():
            if number % 3 == 2:
                assert isinstance(answer, troupellm.AdapterError)
                assert "infinite" in answer.message
            else:
                assert answer == alone[number % 3].token_ids


async def test_F8_files_that_change_after_the_load_end_the_requests_that_need_them(engine_of: Any, loras: Path) -> None:
    async with engine_of(max_loras=1, max_cpu_loras=1) as engine:
        await engine.load_adapter("mine", loras / "bad")
        before = await engine.generate([5, 6], adapter="mine", **GREEDY)
        changed_tensor(loras / "bad", lambda tensor: tensor * 2)
        again = await engine.generate([5, 6], adapter="mine", **GREEDY)
        assert again.token_ids == before.token_ids  # it is in its slot
        await engine.generate([5, 6], adapter="good", **GREEDY)
        with pytest.raises(troupellm.AdapterError):
            await engine.generate([5, 6], adapter="mine", **GREEDY)
        await engine.load_adapter("mine", loras / "bad", replace=True)
        after = await engine.generate([5, 6], adapter="mine", **GREEDY)
        assert after.token_ids != before.token_ids


async def test_F8_adapters_are_loaded_while_the_engine_sleeps(engine_of: Any, loras: Path) -> None:
    async with engine_of() as engine:
        wanted = await engine.generate([5, 6], adapter="good", **GREEDY)
        for level in (1, 2):
            await engine.sleep(level)
            await engine.load_adapter(f"new-{level}", loras / "good")
            await engine.wake()
            answer = await engine.generate([5, 6], adapter=f"new-{level}", **GREEDY)
            assert answer.token_ids == wanted.token_ids


async def test_F8_a_load_during_a_drain_is_answered(engine_of: Any, loras: Path) -> None:
    async with engine_of() as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(engine.generate, [5, 6], adapter="good", **(GREEDY | {"max_tokens": 200})))
            await eventually(lambda: engine.snapshot().scheduler.running == 1)
            group.start_soon(engine.drain, 30.0)
            await eventually(lambda: engine.state == "draining")
            await engine.load_adapter("late", loras / "good")
        with pytest.raises(troupellm.EngineStopped):
            await engine.generate([5, 6], adapter="late", **GREEDY)
    with pytest.raises(troupellm.EngineStopped):
        await engine.load_adapter("later", loras / "good")


async def test_F8_callers_that_load_one_name_at_once_have_one_adapter(engine_of: Any, loras: Path) -> None:
    async with engine_of() as engine:
        outcomes: list[object] = []

        async def load() -> None:
            try:
                outcomes.append((await engine.load_adapter("mine", loras / "good")).digest)
            except troupellm.InvalidRequest as error:
                outcomes.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(load)
        assert sum(isinstance(outcome, str) for outcome in outcomes) == 1
        assert [info.name for info in engine.adapters] == ["mine"]


async def test_F8_settings_that_name_a_bad_adapter_end_the_start(tiny_engine: Any, loras: Path) -> None:
    os.truncate(loras / "bad" / WEIGHTS, 900)
    with pytest.raises(troupellm.ModelLoadError, match=f"lora_modules: sql: {WEIGHTS}"):
        async with tiny_engine(enable_lora=True, lora_modules=[f"sql={loras / 'bad'}"]):
            pass
    with pytest.raises(troupellm.ModelLoadError, match="tiny is the name of the model itself"):
        async with tiny_engine(enable_lora=True, lora_modules=[f"tiny={loras / 'good'}"]):
            pass


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_F8_streams_go_on_and_loads_are_answered_after_a_worker_was_killed(engine_of: Any, loras: Path) -> None:
    async with engine_of(worker_process=True, max_loras=1) as engine:
        options = GREEDY | {"max_tokens": 300}
        wanted = [(await engine.generate([5, 6], adapter=name, **options)).token_ids for name in ("", "good", "bad")]
        got: dict[int, Any] = {}

        async def ask(number: int, name: str) -> None:
            got[number] = (await engine.generate([5, 6], adapter=name, **options)).token_ids

        async with anyio.create_task_group() as group:
            for number, name in enumerate(("", "good", "bad")):
                group.start_soon(ask, number, name)
            await eventually(lambda: engine.snapshot().scheduler.running == 2)
            os.kill(engine.snapshot().worker_pid, 9)
            late = await engine.load_adapter("late", loras / "good")  # while there is no worker
        assert late.digest == {info.name: info.digest for info in engine.adapters}["good"]
        assert (await engine.generate([5, 6], adapter="late", **options)).token_ids == wanted[1]
        assert [got[number] for number in range(3)] == wanted
        assert engine.snapshot().scheduler.worker_losses == 1


ROUNDS, WARM_ROUNDS, ASKS = 1700, 400, 6
MOST_GROWTH = 24 * 2**20
"""Bytes: of 2 kB for each operation, nothing may be left."""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_F8_ten_thousand_random_loads_requests_and_aborts_leave_nothing(engine_of: Any, loras: Path) -> None:
    """Slots, names, host memory and the process's memory are as they were, and each model answers as before."""
    random, names = np.random.default_rng(7), [f"n{seed}" for seed in range(6)]
    for seed, name in enumerate(names):
        write_tiny_adapter(loras / name, 10 + seed)
    async with engine_of(max_loras=2, max_cpu_loras=3) as engine:
        wanted = {name: (await engine.generate([5, 6], adapter=name, **GREEDY)).token_ids for name in ("", *names)}
        done = {"answered": 0, "given up": 0, "loaded": 0, "unloaded": 0}
        before = 0

        async def ask(name: str, patience: float) -> None:
            with anyio.move_on_after(patience) as scope:
                assert (await engine.generate([5, 6], adapter=name, **GREEDY)).token_ids == wanted[name]
            done["given up" if scope.cancelled_caught else "answered"] += 1

        for number in range(ROUNDS):
            if number == WARM_ROUNDS:
                before = resident_bytes()
            async with anyio.create_task_group() as group:
                for asked in random.choice(list(wanted), ASKS):
                    group.start_soon(ask, str(asked), float(random.choice([60.0, 60.0, 0.005])))
                name = str(random.choice(names))
                if random.random() < 0.5:
                    await engine.load_adapter(name, loras / name, replace=True)
                    done["loaded"] += 1
                elif any(info.name == name for info in engine.adapters):
                    await engine.unload_adapter(name)
                    done["unloaded"] += 1
        await eventually(lambda: not engine.snapshot().open_requests)
        assert sum(done.values()) >= 10_000
        assert min(done.values()) > 100
        assert resident_bytes() - before < MOST_GROWTH
        adapters = engine.snapshot().scheduler.adapters
        assert (adapters.slots_used, adapters.running, adapters.waiting) == (0, (), ())
        assert adapters.host <= 3
        for name, tokens_of in wanted.items():
            assert (await engine.generate([5, 6], adapter=name, **GREEDY)).token_ids == tokens_of
