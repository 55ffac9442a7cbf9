"""adapter_config.json of PEFT: the keys that change the result, and a refusal of all that is not served."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.json_file import read_object
from troupellm.models.hub.model_folder import check_file
from troupellm.protocol.errors import AdapterError, ModelLoadError

FILE = "adapter_config.json"
MERGE = "merge the adapter into its base model with PEFT's merge_and_unload() and serve the merged model"
_UNSERVED = {
    "alora_invocation_tokens": "an adapter that begins at a token",
    "arrow_config": "a router over adapters",
    "fan_in_fan_out": "weights that hold inputs before outputs",
    "kasa_config": "KaSA",
    "layer_replication": "repeated layers",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trained token embeddings",
    "use_bdlora": "BD-LoRA",
    "use_qalora": "QA-LoRA",
    "velora_config": "VeLoRA",
}
"""Keys that change the result, and what they mean; harmless while they are off."""
_OF_TRAINING = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora",
    "use_rslora",
))  # fmt: skip
"""Keys that are read here, or that only training looks at: the names of the tensors say which modules have a part."""
_KEEPS_THE_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Values of init_lora_weights after which the base model's own weights are as they were."""
_MOST_PATTERNS, _LONGEST_PATTERN, _MOST_REPEATS = 1024, 512, 2
_REPEATS = re.compile(r"(?<!\\)[*+{]")
_NESTED = re.compile(r"\)[*+?{]|\\[1-9]|\(\?")


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rank and scale of each module's adapter."""

    rank: int
    alpha: float
    rank_pattern: tuple[tuple[str, int], ...]
    """Regular expressions of module names, the first one that fits the end of a name counts."""
    alpha_pattern: tuple[tuple[str, float], ...]
    rslora: bool
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    bias: bool
    """The second matrix has a bias."""
    dora: bool
    """Each module has the lengths that the rows of its adapted weight are brought to."""
    ties: bool
    """The head shares the embedding's adapter, where the base model's weights are shared."""
    base_model_name: str

    def rank_of(self, module: str) -> int:
        """module: the name within the base model, as PEFT says it."""
        return next((rank for pattern, rank in self.rank_pattern if _fits(pattern, module)), self.rank)

    def checked_rank(self, module: str, most: int) -> int:
        """As `rank_of`.

        Raises:
            AdapterError: it is larger than `most`.
        """
        rank = self.rank_of(module)
        if rank > most:
            raise AdapterError(
                f"the adapter has rank {rank} at {plain_name(module)}, this server takes at most {most}",
                hint=f"start it with --max-lora-rank {rank}",
            )
        return rank

    def scale_of(self, module: str) -> float:
        """The factor on a module's product."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if _fits(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def canonical(self) -> bytes:
        """Equal for settings that give equal results."""
        counting = msgspec.structs.asdict(msgspec.structs.replace(self, base_model_name=""))
        return json.dumps(counting, sort_keys=True).encode()


def read_settings(folder: Path) -> AdapterSettings:
    """
    Raises:
        AdapterError: the file is missing or damaged, or asks for what is not served.
    """
    path = folder / FILE
    try:
        check_file(path)
        values = read_object(path)
    except FileNotFoundError:
        raise AdapterError(f"{FILE} is missing", hint="name a folder that PEFT's save_pretrained() wrote") from None
    except ModelLoadError as error:
        raise AdapterError(error.message, hint=error.hint) from error
    _refuse_unserved(values)
    return AdapterSettings(
        rank=_rank(values.get("r", 8), "r"),
        alpha=_number(values.get("lora_alpha", 8), "lora_alpha"),
        rank_pattern=_pattern(values, "rank_pattern", _rank),
        alpha_pattern=_pattern(values, "alpha_pattern", _number),
        rslora=_flag(values, "use_rslora"),
        bias=_flag(values, "lora_bias"),
        dora=_flag(values, "use_dora"),
        ties=_flag(values, "ensure_weight_tying"),
        base_model_name=str(values.get("base_model_name_or_path") or ""),
    )


def _refuse_unserved(values: dict[str, Any]) -> None:
    if values.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{FILE}: peft_type {_shown(values['peft_type'])} is not served", hint="use LORA")
    for key, meaning in _UNSERVED.items():
        if values.get(key):
            raise AdapterError(f"{FILE}: {key} ({meaning}) is not served", hint=MERGE)
    if values.get("bias", "none") != "none":
        raise AdapterError(f"{FILE}: bias {_shown(values['bias'])} (trained biases) is not served", hint=MERGE)
    begun = values.get("init_lora_weights", True)
    if not (begun is None or isinstance(begun, bool) or begun in _KEEPS_THE_BASE):
        hint = "save it with PEFT's path_initial_model_for_weight_conversion, which makes it fit the base model"
        raise AdapterError(f"{FILE}: init_lora_weights {_shown(begun)} changes the base model's own weights", hint=hint)
    for key, value in values.items():
        if key not in _OF_TRAINING and key not in _UNSERVED and value:
            raise AdapterError(f"{FILE}: the key {plain_name(key)} is not known", hint=MERGE)


def _rank(value: object, key: str) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{FILE}: {key} must be an integer from 1 on, not {_shown(value)}")
    return value


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{FILE}: {key} must be a number, not {_shown(value)}")
    return float(value)


def _flag(values: dict[str, Any], key: str) -> bool:
    value = values.get(key) or False
    if not isinstance(value, bool):
        raise AdapterError(f"{FILE}: {key} must be true or false, not {_shown(value)}")
    return value


def _pattern(values: dict[str, Any], key: str, read: Any) -> tuple[tuple[str, Any], ...]:
    found = values.get(key) or {}
    if not isinstance(found, dict) or len(found) > _MOST_PATTERNS:
        raise AdapterError(f"{FILE}: {key} must be an object of at most {_MOST_PATTERNS} entries")
    return tuple((_safe(pattern, key), read(value, f"{key}.{plain_name(pattern)}")) for pattern, value in found.items())


def _safe(pattern: str, key: str) -> str:
    """A regular expression that takes little time on any name: no group repeats, and few parts do."""
    simple = len(pattern) <= _LONGEST_PATTERN and len(_REPEATS.findall(pattern)) <= _MOST_REPEATS
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        simple = False
    if not simple or _NESTED.search(pattern):
        raise AdapterError(
            f"{FILE}: {key} has the pattern {plain_name(pattern)}, which is no plain name or simple regular expression",
            hint="write out the names of the modules",
        )
    return pattern


def _fits(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _shown(value: object) -> str:
    return plain_name(json.dumps(value))
