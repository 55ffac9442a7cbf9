"""The servers of `bench serve --peers`: how each is started, and what its requests need to say."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from troupellm.load_tests.peers.environments import TROUPE, environment_of, python_of
from troupellm.load_tests.peers.process import ContestantError

LAYOUTS: dict[str, tuple[str, ...]] = {
    TROUPE: (),
    "thread": ("--no-worker-process", "--api-server-count", "0"),
    "process": ("--worker-process", "--api-server-count", "0"),
    "thread+front": ("--no-worker-process", "--api-server-count", "1"),
    "process+front": ("--worker-process", "--api-server-count", "1"),
}
"""Ours: as it comes, the model on a thread or in a process of its own, HTTP in the engine's process or in another."""
RIVALS = ("llama", "vllm")
SERVERS = (*LAYOUTS, *RIVALS)


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One server process."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int
    body: dict[str, Any]
    """Fields that its requests have beside the common ones."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def home_of(name: str) -> str:
    """The contestant whose environment a server runs in."""
    return TROUPE if name in LAYOUTS else name


def plan_server(
    name: str, *, model: Path, peers: Path, link: Path, threads: int, sequences: int, length: int
) -> ServerPlan:
    """How to start one of `SERVERS`.

    Raises:
        ContestantError: it is not installed.
    """
    python, port = python_of(home_of(name), peers), free_port()
    if python is None:
        raise ContestantError(f"{name}: not installed in {peers}; `make peers` does that")
    environment = environment_of(home_of(name), python, link, threads)
    body: dict[str, Any] = {}
    if name == "llama":
        binary = peers.absolute() / "llama" / "build" / "bin" / "llama-server"
        if not binary.exists():
            raise ContestantError(f"{name}: there is no {binary}; `make peers` compiles it")
        command = [
            *(str(binary), "--model", str(model), "--port", str(port), "--parallel", str(sequences)),
            *("--ctx-size", str(sequences * length), "--threads", str(threads), "--threads-batch", str(threads)),
        ]
        body = {"cache_prompt": False}
    elif name == "vllm":
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
        command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(length), "--max-num-seqs", str(sequences)),
            *("--no-enable-prefix-caching", "--served-model-name", "model"),
        ]
    else:
        command = [
            *(sys.executable, "-m", "troupellm.server.cli.main", "serve", str(model), "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(length), "--max-num-seqs", str(sequences)),
            *("--no-enable-prefix-caching", "--num-threads", str(threads), "--served-model-name", "model"),
            *("--no-spare-worker", *LAYOUTS[name]),  # a spare would import torch beside the first requests
        ]
    return ServerPlan(name=name, command=command, environment=environment, port=port, body=body)
