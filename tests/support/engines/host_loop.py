"""A program whose event loop runs before it names an engine: what becomes of the loop, and which errors it sees.

Prints one JSON value. It imports nothing of ours ahead, so that it begins as a host does.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import troupellm

ECHO = "troupellm.tests.support.workers.echo_worker:EchoWorker"
TICK_SECONDS = 0.001


async def held(model: str) -> dict[str, float]:
    """Processor time in milliseconds that the loop's thread has at most between two of the host's turns.

    Processor time, because a busy machine makes the host wait without an engine too.
    """
    most = {"open": 0.0, "block": 0.0}
    phase = ["open"]

    async def tick() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(TICK_SECONDS)
            most[phase[0]] = max(most[phase[0]], 1e3 * (time.thread_time() - before))

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.0)
    engine = await troupellm.Engine.open(model, worker=ECHO)
    await engine.generate("hello", max_tokens=2)
    phase[0] = "block"
    async with troupellm.Engine(model, worker=ECHO) as second:
        await second.generate("hello", max_tokens=2)
    ticking.cancel()
    await engine.aclose()
    return most


async def late(model: str) -> dict[str, Any]:
    """Facts of the class that the loop finds before the engine is imported."""
    late_class = troupellm.Engine
    engine = late_class(model, worker=ECHO)
    before = isinstance(engine, late_class), "troupellm.actors.engine.engine" in sys.modules
    async with engine as entered:
        same = entered is engine
        text = (await engine.generate("hello", max_tokens=2)).usage is not None
    stopped = engine.state
    wrong = late_class(model, max_seqs=3)
    try:
        async with wrong:
            refused = "nothing"
    except troupellm.ConfigError as error:
        refused = str(error.param)
    return {
        "before": before,
        "same": same,
        "answers": text,
        "state": stopped,
        "refused": refused,
        "is_engine": type(engine) is troupellm.Engine and isinstance(engine, late_class),
        "imported_now": troupellm.Engine is not late_class,
    }


async def inherited(model: str) -> dict[str, Any]:
    """A subclass, and an attribute, of the class that is not imported yet."""

    class Mine(troupellm.Engine):
        """The host's own."""

    async with Mine(model, worker=ECHO) as engine:
        return {"is_mine": type(engine) is Mine, "config": troupellm.Engine(model).config.model.model == model}


async def forked(model: str) -> dict[str, str]:
    """Errors that a fork gets from the engine and the `LLM` of its parent, which go on."""
    from troupellm import LLM

    with LLM(model, worker=ECHO) as llm:
        async with troupellm.Engine(model, worker=ECHO) as engine:
            read, write = os.pipe()
            if not os.fork():
                heard = {"engine": _child_error(lambda: asyncio.run(engine.generate("hello"))), "llm": "", "left": ""}
                heard["llm"] = _child_error(lambda: llm.generate("hello", use_tqdm=False))
                heard["left"] = _child_error(lambda: (llm.close(), asyncio.run(engine.aclose())))
                os.write(write, json.dumps(heard).encode())
                os._exit(0)
            os.close(write)
            report: dict[str, str] = json.loads(await asyncio.to_thread(os.read, read, 4096))
            await asyncio.to_thread(os.wait)
            await engine.generate("hello", max_tokens=2)
            llm.generate("hello", use_tqdm=False)
    return report


def _child_error(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


if __name__ == "__main__":
    print(json.dumps(asyncio.run(globals()[sys.argv[1]](sys.argv[2]))))
