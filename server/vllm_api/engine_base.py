"""The common base of `LLMEngine` and `AsyncLLMEngine`: an engine in a thread, and its open requests."""

import weakref
from collections.abc import Awaitable, Callable
from copy import copy
from functools import cached_property
from typing import Any, NoReturn, Self, TypeVar

import msgspec

from troupellm.actors.engine.engine import Engine
from troupellm.actors.engine.engine_thread import EngineThread
from troupellm.actors.llm.script_tokenizer import ScriptTokenizer
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.vllm.names import refuse_name
from troupellm.server.vllm_api.engine_args import EngineArgs
from troupellm.server.vllm_api.requests import OpenRequests

T = TypeVar("T")
ParamsT = TypeVar("ParamsT", SamplingParams, PoolingParams, SamplingParams | PoolingParams)


class ThreadedEngine:
    """Loads the model at once.

    Args:
        engine: not entered yet.

    Raises:
        ModelLoadError: the model cannot be served.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._home = EngineThread(engine)
        self._requests = OpenRequests(engine)
        self._finalizer = weakref.finalize(self, self._home.watch.fire)
        self._finalizer.atexit = False  # too late: threads are joined before

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: object, **__: object) -> Self:
        """The engine of these settings. Further arguments of vLLM's method change nothing.

        Raises:
            ConfigError: a wrong or unsupported value.
            ModelLoadError: the model cannot be served.
        """
        return cls.from_vllm_config(engine_args.create_engine_config())

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, *_: object, **__: object) -> Self:
        """The engine of a configuration that `EngineArgs.create_engine_config` made."""
        return cls(Engine(config=vllm_config))

    def get_num_unfinished_requests(self) -> int:
        """How many requests have outputs to come."""
        return len(self._requests)

    def collective_rpc(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: a worker runs no code of its caller."""
        refuse_name("collective_rpc")

    def apply_model(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: a worker runs no code of its caller."""
        refuse_name("apply_model")

    def shutdown(self) -> None:
        """End what runs, free the model and end the thread. Idempotent."""
        self._finalizer.detach()
        self._home.close()

    def _wait_for(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Have it done on the engine's event loop; an interrupt ends it."""
        future = self._running.portal.start_task_soon(work, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @cached_property
    def _tokenizer(self) -> ScriptTokenizer:
        return ScriptTokenizer.of(self.engine)

    @property
    def _running(self) -> EngineThread:
        if not self._finalizer.alive:
            raise EngineStopped("the engine was shut down", code="stopped")
        self._home.check()
        return self._home


def settled(params: ParamsT, priority: int) -> ParamsT:
    """The parameters of a request as they hold."""
    return msgspec.structs.replace(params, priority=priority) if priority else copy(params)
