"""The resources of an idle server, and its memory, as far as they can be seen from outside."""

import asyncio
import os
import time

import httpx
import msgspec

from troupellm.load_tests.traffic.own_server import OwnServer, listing, process_tree

IDLE_SECONDS = 60.0
SETTLED_SECONDS = 3.0
"""Tasks of connections end a little after their last byte: they are counted when their number has stayed so long."""
MEBIBYTE = 2**20


class Held(msgspec.Struct, frozen=True):
    """The resources of an idle server."""

    descriptors: int
    tasks: int
    threads: int
    blocks: int
    requests: int
    messages: int


def resident_mebibytes(server: OwnServer) -> float:
    """Of all processes together."""
    return sum(_resident(pid) for pid in process_tree(server.pid)) / MEBIBYTE


def own_mebibytes(server: OwnServer) -> float:
    """Of the process that was started, without those below it."""
    return _resident(server.pid) / MEBIBYTE


async def held_when_idle(server: OwnServer) -> Held:
    """Once it is idle, or has not become so for `IDLE_SECONDS`."""
    due = (settled := time.monotonic()) + IDLE_SECONDS
    tasks = -1.0
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        while True:
            metrics = _sums((await client.get("/metrics")).text)
            requests = metrics["requests_running"] + metrics["requests_waiting"] + metrics["requests_open"]
            blocks, messages = metrics["kv_blocks_used"], metrics["actor_mailbox_depth"]
            now = time.monotonic()
            if requests + blocks + messages or metrics["tasks"] != tasks:
                settled, tasks = now, metrics["tasks"]
            if now - settled > SETTLED_SECONDS or now > due:
                break
            await asyncio.sleep(0.2)
        pids = process_tree(server.pid)
        return Held(
            descriptors=sum(_count(pid, "fd") for pid in pids),
            tasks=int(metrics["tasks"]),
            threads=sum(_count(pid, "task") for pid in pids),
            blocks=int(blocks),
            requests=int(requests),
            messages=int(messages),
        )


def _sums(text: str) -> dict[str, float]:
    """Sums over the samples of each metric that `held_when_idle` looks at."""
    sums = dict.fromkeys(
        ("requests_running", "requests_waiting", "requests_open", "kv_blocks_used", "actor_mailbox_depth", "tasks"), 0.0
    )
    for line in text.splitlines():
        if line.startswith("troupellm_"):
            name = line.removeprefix("troupellm_").partition("{")[0]
            name = "kv_blocks_used" if name == "kv_blocks" and 'state="used"' in line else name
            if name in sums:
                sums[name] += float(line.split()[-1])
    return sums


def _count(pid: int, kind: str) -> int:
    return len(listing(f"/proc/{pid}/{kind}"))


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
