"""Reads a quantization section: keys that cannot change the arithmetic are ignored and noted, the rest is refused."""

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from troupellm.models.config.hf_config import ConfigReader, is_on, whole
from troupellm.models.hub.errors import plain_name

MOST_NAMES = 65_536
_MOST_SHOWN = 32
MAKING = frozenset(
    {
        "method", "dataset", "tokenizer", "damp_*", "true_sequential", "static_groups", "model_name_or_path",
        "model_file_base_name", "quantizer", "meta", "batch_size", "backend", "model_seqlen", "block_name_to_quantize",
        "cache_block_outputs", "max_input_length", "module_name_preceding_first_block", "pad_token_id",
        "act_group_aware", "mse", "modules_in_block_to_quantize", "pack_impl", "gptaq*", "hessian", "fallback",
        "failsafe", "offload_*", "vram_strategy", "gc_mode", "uri", "mock_quantization",
        "wait_for_submodule_finalizers", "auto_forward_data_parallel",
    }
)  # fmt: skip
"""Settings of tools (AutoGPTQ, GPTQModel, Optimum, AutoAWQ) that do not change the meaning of the tensors."""
AUTOROUND_MAKING = frozenset(
    {
        "iters", "nsamples", "seqlen", "lr", "minmax_lr", "batch_size", "amp", "low_gpu_mem_usage", "train_bs",
        "autoround_version", "provider", "scale_dtype", "gradient_accumulate_steps", "model_free", "quant_block_list",
        "to_quant_block_names", "block_name_to_quantize", "supported_types", "not_use_best_mse", "lr_scheduler",
        "sampler", "seed", "dynamic_max_gap", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
        "enable_torch_compile", "enable_alg_ext", "enable_deterministic_algorithms", "act_*",
    }
)  # fmt: skip
"""The same for AutoRound. Its settings of inputs have no effect if `act_bits` is 16, which `check_numbers` requires."""
NUMBERS = frozenset({"data_type", "act_bits"})
PLAIN_BITS = 16


def only(reader: ConfigReader, known: Collection[str], harmless: Collection[str] = ()) -> tuple[str, ...]:
    """The settings that are ignored: the harmless ones, and unknown ones that are off.

    Args:
        known: settings that are read.
        harmless: settings of the tool that cannot change the meaning of the tensors; `damp_*` is all that begin so.

    Raises:
        ModelLoadError: there is another setting.
    """
    ignored = tuple(key for key in reader.values if key not in known and reader.values[key] is not None)
    for key in ignored:
        if is_on(reader.values[key]) and not any(fnmatchcase(key, pattern) for pattern in harmless):
            raise reader.refuse(key, "is not supported")
    return ignored


def check_numbers(reader: ConfigReader) -> None:
    """Weights are whole numbers and inputs are not quantized, as far as `NUMBERS` say.

    Raises:
        ModelLoadError: they are something else.
    """
    reader.choice("data_type", ("int", "int_asym", "int_sym"), "int")
    if reader.integer("act_bits", PLAIN_BITS) < PLAIN_BITS:
        raise reader.refuse("act_bits", f"must be {PLAIN_BITS}: inputs keep their type")


def ignored_note(reader: ConfigReader, keys: Collection[str]) -> tuple[str, ...]:
    """One line for the load log about settings that are ignored; none where there are none."""
    if not keys:
        return ()
    shown = ", ".join(plain_name(key) for key in list(keys)[:_MOST_SHOWN])
    more = f" and {len(keys) - _MOST_SHOWN} more" if len(keys) > _MOST_SHOWN else ""
    return (f"{reader.place_of('')}{shown}{more} cannot change the result and are ignored",)


def texts(reader: ConfigReader, key: str) -> tuple[str, ...]:
    """A list of texts; empty when it is missing or null.

    Raises:
        ModelLoadError: something else.
    """
    value = reader.values.get(key)
    if not is_on(value):
        return ()
    if not isinstance(value, list) or len(value) > MOST_NAMES or not all(isinstance(item, str) for item in value):
        raise reader.refuse(key, f"must be a list of at most {MOST_NAMES} texts")
    return tuple(value)


def pair(reader: ConfigReader, key: str) -> tuple[int, int]:
    """Two whole numbers above zero.

    Raises:
        ModelLoadError: something else.
    """
    value = reader.values.get(key)
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", value):  # 128x128
        value = [int(side) for side in value.split("x")]
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        first, second = map(whole, value)
        if all(isinstance(item, int) and not isinstance(item, bool) and item > 0 for item in (first, second)):
            return first, second
    raise reader.refuse(key, "must be two integers of at least 1")
