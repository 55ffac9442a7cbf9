"""The parts of running objects that tests look into; no other file of the tests names these private attributes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from troupellm.actors.engine.engine import Engine
from troupellm.actors.replicas.replica import Replica
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.kernels.cpp import build
from troupellm.models.kv_offload.disk_store import DiskStore
from troupellm.models.worker.worker import ModelWorker


def system_of(engine: Engine) -> Any:
    """The actors of a running engine and their mailboxes."""
    running = engine._running
    assert running is not None
    return running.system


def worker_host_of(engine: Engine) -> Any:
    """The thread or process that the worker actor drives."""
    return system_of(engine)._worker._worker_host


def child_of(replica: Replica) -> Any:
    """The process of a fleet's replica."""
    return replica._process


def residents_of(core: SchedulerCore) -> Any:
    return core._running_set


def shares_of(core: SchedulerCore) -> Any:
    return residents_of(core)._fair_share


def ledger_of(core: SchedulerCore) -> Any:
    return core._open


def block_tables_of(core: SchedulerCore) -> Any:
    return core._tables


def offload_of(core: SchedulerCore) -> Any:
    """The scheduler's side of KV offload."""
    return core._offload


def runner_of(worker: ModelWorker) -> Any:
    """The model runner of a worker that has loaded."""
    return worker.runner


def parts_of(worker: ModelWorker) -> Any:
    """The parts of the loaded model."""
    return worker._loaded.parts


def transfers_of(worker: ModelWorker) -> Any:
    """The worker's transfers of KV blocks."""
    return worker._loaded.moves


def guided_rows_of(guides: Any) -> Any:
    """Guided rows by their numbers."""
    return guides._rows


def folder_of(store: DiskStore) -> Path:
    return store._path


def clients_of(consumer: Any) -> Any:
    """The connections of a tcp-peer consumer, by peer."""
    return consumer._clients


def block_lru_of(producer: Any) -> Any:
    """The blocks that a tcp-peer producer offers."""
    return producer._served


def counters_of(shares: Any) -> Any:
    """Virtual tokens by tenant."""
    return shares._served


def early_aborts_of(core: SchedulerCore) -> Any:
    return core._early_aborts


def cached_blocks_of(pool: Any) -> Any:
    return pool._cached


def order_of(standing: Any) -> Any:
    return standing._order


def set_prompt_cost(cost: Any, per_token: Callable[[], float]) -> None:
    """From now on a token of a prompt takes so many seconds to compute."""
    cost._per_token = per_token


def pulse_of(system: Any) -> Any:
    """The numbers that the watchdog compares."""
    return system._pulse()


def members_of(fleet: Any) -> Any:
    """The API processes of a fleet."""
    return fleet._api_processes


def send_together(link: Any, *messages: Any) -> None:
    """Send several messages to a worker in one write."""
    link._socket.sendall(b"".join(map(link._codec.encode, messages)))


def source_of(parser: Any) -> Any:
    """The text that a parser reads."""
    return parser._source


def fingerprint_of(worker: ModelWorker) -> str:
    ready = worker._ready
    return "" if ready is None else ready.fingerprint


def arena_of(worker: ModelWorker) -> Any:
    """The worker's host memory for KV blocks."""
    return transfers_of(worker)._host_buffer


def marks_of(proposer: Any) -> Any:
    return proposer._marks


def hidden_states_of(proposer: Any) -> Any:
    return proposer._states


def spans_of(plan: Any) -> tuple[Any, Any]:
    """First positions and numbers of the query tokens of each row."""
    return plan._starts, plan._counts


def compiler_path() -> Any:
    """The C++ compiler of this machine; None without one."""
    return build._compiler()


def static_logits_of(graphs: Any) -> Any:
    return graphs._logits


def static_taps_of(graphs: Any) -> Any:
    return graphs._aux_layers


def possible_graphs_of(runner: Any) -> Any:
    return runner.graphs.dispatcher._possible


def warm_up_graph(runner: Any, key: Any) -> None:
    runner.graphs._warm_up(key)


def runs_of(peer: Any) -> Any:
    return peer._runs


def runs_by_key_of(peer: Any) -> Any:
    return peer._run_of


def busy_connections_of(peer: Any) -> Any:
    return peer._busy


def idle_connections_of(peer: Any) -> Any:
    return peer._idle


def wires_of(server: Any) -> Any:
    """The connections of a tcp-peer producer's server."""
    return server._wires


def signature_of(store: Any) -> Any:
    return store._signature
