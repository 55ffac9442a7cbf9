"""Public names of vLLM that ask for what is not supported: each use is refused by a sentence that says what to do."""

from typing import Any, Final, NoReturn

from troupellm.protocol.errors import ConfigError

SENTENCES: Final = {
    "ModelRegistry": "model code is not taken from a script; install a plug-in of the entry point group"
    " troupellm.models, or use model_impl transformers",
    "initialize_ray_cluster": "one engine drives one device, without Ray; run one server per device behind a balancer",
    "collective_rpc": "a worker runs no code of its caller; use the methods of the engine",
    "apply_model": "a worker runs no code of its caller; read the checkpoint in the script",
}
"""By name, what to do instead."""


def refuse_name(name: str) -> NoReturn:
    """
    Raises:
        ConfigError: always; says what to do instead.
    """
    raise ConfigError(f"{name} is known from vLLM but not supported here: {SENTENCES[name]}", param=name)


class RefusedName:
    """Stands for a class or function of vLLM. Importing it is fine; using it is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        refuse_name(self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse_name(self._name)

    def __repr__(self) -> str:
        return f"<{self._name} of vLLM, which is not supported>"


ModelRegistry = RefusedName("ModelRegistry")
initialize_ray_cluster = RefusedName("initialize_ray_cluster")
