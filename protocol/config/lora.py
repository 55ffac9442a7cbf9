"""Settings of LoRA adapters: how many are served at once, and where they come from."""

import re
from typing import Annotated, Any, Final, Literal

import msgspec

from troupellm.protocol.config.setting_types import PositiveInt, help_text as _help
from troupellm.protocol.errors import ConfigError

MODULES: Final = "lora_modules"
MOST_ADAPTERS: Final = 4096
"""Names that one engine knows at a time."""
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9._/-]{1,128}")
"""Names of adapters, whole."""
_HUB: Final = "lora_allow_hub"
_REPOSITORIES: Final = re.compile(r"[A-Za-z0-9._-]{1,96}/[A-Za-z0-9._*-]{1,96}")
"""Of one owner of the hub, whose name is written out."""
_CPU_FACTOR: Final = 4


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is there from the start. The keys are vLLM's."""

    name: str
    path: str
    base_model_name: str | None = None
    """Reported as the adapter's parent in `/v1/models`, in place of the model's name."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapters, which clients choose by the name of the model.

    Raises:
        ConfigError: (a ValueError) settings that do not go together; `param` names the one at fault.
    """

    enable_lora: Annotated[bool, _help("serve LoRA adapters beside the model")] = False
    lora_modules: Annotated[
        tuple[str | dict[str, Any], ...],
        _help('adapters that are there from the start: name=folder, or {"name", "path", "base_model_name"}'),
    ] = ()
    max_loras: Annotated[PositiveInt, _help("adapters that one step may use beside the model itself")] = 8
    max_lora_rank: Annotated[PositiveInt, _help("largest rank of an adapter; each slot has room for it")] = 16
    max_cpu_loras: Annotated[
        PositiveInt | None, _help("adapters that are kept in host memory (default: four times max_loras)")
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], _help("dtype of adapters; auto: that of activations")
    ] = "auto"
    lora_dir: Annotated[
        tuple[str, ...],
        _help("folder whose folders are adapters by name, repeatable; load calls and requests may read no others"),
    ] = ()
    lora_allow_hub: Annotated[
        tuple[str, ...],
        _help("hub repositories whose adapters requests may name, owner/name or owner/*, repeatable"),
    ] = ()

    def __post_init__(self) -> None:
        if not self.enable_lora:
            given = {MODULES: self.lora_modules, "lora_dir": self.lora_dir, _HUB: self.lora_allow_hub}
            for name in (name for name, values in given.items() if values):
                raise ConfigError(f"{name} needs enable_lora: without it no adapter is served", param=name)
        for pattern in self.lora_allow_hub:
            if _REPOSITORIES.fullmatch(pattern) is None:
                text = f"{_HUB}: {pattern[:64]!r} is not understood; give owner/name or owner/*"
                raise ConfigError(text, param=_HUB)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras ({self.max_cpu_loras}) must not be less than max_loras ({self.max_loras}): "
                "an adapter in a slot is in host memory, too",
                param="max_cpu_loras",
            )
        names: set[str] = set()
        for module in self.modules:
            check_adapter_name(module.name, MODULES)
            if module.name in names:
                raise ConfigError(f"{MODULES}: {module.name!r} is given twice", param=MODULES)
            names.add(module.name)
        if len(names) > MOST_ADAPTERS:
            raise ConfigError(f"{MODULES}: {len(names)} adapters; at most {MOST_ADAPTERS} are possible", param=MODULES)

    @property
    def enabled(self) -> bool:
        return self.enable_lora

    @property
    def dtype(self) -> str:
        return self.lora_dtype

    @property
    def dirs(self) -> tuple[str, ...]:
        return self.lora_dir

    @property
    def num_slots(self) -> int:
        """Adapters that one step may use; 0 where none are served."""
        return self.max_loras if self.enable_lora else 0

    @property
    def host_adapters(self) -> int:
        """How many adapters host memory holds in the end."""
        return self.max_cpu_loras or _CPU_FACTOR * self.max_loras

    @property
    def modules(self) -> tuple[LoraModule, ...]:
        return tuple(map(_read, self.lora_modules))


def is_adapter_name(name: str) -> bool:
    """Whether a name has the right characters, and names a folder below another one."""
    return ADAPTER_NAME.fullmatch(name) is not None and not {"", ".", ".."} & set(name.split("/"))


def check_adapter_name(name: str, param: str) -> None:
    """
    Raises:
        ConfigError: the name has other characters, or is too long.
    """
    if not is_adapter_name(name):
        raise ConfigError(
            f"{param}: {name[:64]!r} is no name of an adapter; use 1 to 128 letters, digits, '.', '_', '-' and '/'",
            param=param,
        )


def _read(given: str | dict[str, Any]) -> LoraModule:
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        name, equals, path = given.partition("=")
        if not equals or not path:
            raise ConfigError(f"{MODULES}: {given[:64]!r} is not understood; give name=folder", param=MODULES)
        return LoraModule(name, path)
    try:
        if isinstance(given, str):
            return msgspec.json.decode(given.encode(), type=LoraModule)
        return msgspec.convert(given, LoraModule)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{MODULES}: {error}; give name, path and base_model_name", param=MODULES) from None
