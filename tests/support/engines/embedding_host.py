"""A program that embeds an engine with a worker process and is killed: prints the children's ids once they compute."""

import sys
from pathlib import Path

import anyio

from troupellm import Engine
from troupellm.tests.support.servers.serving import eventually
from troupellm.tests.support.workers.faulty_worker import FACTORY


async def main(model: str, fault: str) -> None:
    settings = {"kv_cache_memory_bytes": 4 << 20, "num_threads": 1, "worker_process": True}
    async with Engine(model, worker=FACTORY, **settings) as engine:
        await engine.generate("x", max_tokens=2)
        await eventually(lambda: engine.snapshot().spare_worker_pid is not None)
        if fault:
            Path(model, "fault").write_text(fault)
        snapshot = engine.snapshot()
        async with engine.stream("y", max_tokens=3000, ignore_eos=True) as stream:
            if not fault:
                await anext(aiter(stream))
            else:
                await eventually(lambda: not Path(model, "fault").exists())
            print(snapshot.worker_pid, snapshot.spare_worker_pid, flush=True)
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
