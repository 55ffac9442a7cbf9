"""A quantized checkpoint for a model of `transformers`: linear layers stay in their codes, all else becomes plain."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Linear

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.checkpoint.next_token_tensors import next_token_tensors
from troupellm.models.checkpoint.weight_names import decoder_weights, stored_names
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.decoder import EMBEDDING
from troupellm.models.quantization.checkpoint import KV_SCALES, QuantizedCheckpoint, layer_of
from troupellm.models.transformers_backend.linears import PackedLayer, on_load
from troupellm.protocol.config.setting_types import OnLoad


class StoredParts(NamedTuple):
    """All that a checkpoint holds."""

    layers: dict[str, PackedLayer]
    """By the names of the model's modules."""
    tensors: dict[str, Tensor]
    """By the names of a checkpoint of the decoder alone, which the library renames."""


def read_parts(stored: QuantizedCheckpoint, skeleton: Any, config: DecoderConfig, mode: OnLoad | None) -> StoredParts:
    """Read a checkpoint to its end.

    Args:
        skeleton: the model without numbers.
        mode: how weights are quantized once more.

    Raises:
        ModelLoadError: a tensor is damaged, or is not stored as the configuration says.
    """
    asked = _asked(stored, config)
    own_name, parts = _renaming(skeleton), StoredParts({}, {})
    modules = dict(skeleton.named_modules())
    quantized = set[str]()
    for layer in sorted({layer_of(name) for name in stored.names()}):
        outline = stored.form.outline(stored, layer)
        if outline is None:
            continue
        quantized.add(layer)
        name = own_name(asked(f"{layer}.weight"))
        module = None if name is None else modules.get(name.removesuffix(".weight"))
        if name is None or type(module) is not Linear:  # the library puts it together with others
            weight = stored.linear(layer, (outline.rows, outline.columns))
            plain = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
            parts.tensors[asked(f"{layer}.weight")] = plain
            continue
        name, shape = name.removesuffix(".weight"), (module.out_features, module.in_features)
        weight = on_load(name, stored.linear(layer, shape), mode)
        bias = None if module.bias is None else stored.take(f"{layer}.bias", shape[:1])
        parts.layers[name] = PackedLayer(weight, bias, stored.dtype)
    for name in list(stored.names()):
        if not name.endswith(KV_SCALES) and not (name.endswith(".bias") and layer_of(name) in quantized):
            parts.tensors[asked(name)] = stored.take(name, stored.shape_of(name) or ())
    stored.finish()
    return parts


def _asked(stored: QuantizedCheckpoint, config: DecoderConfig) -> Callable[[str], str]:
    """From a tensor's name to that in a checkpoint of the decoder alone; tensors of other parts are ignored."""
    if config.text_part:
        names = stored_names(config, stored, EMBEDDING)
        decoder_weights(config, stored, EMBEDDING)  # removes the tensors of other parts
        return names.asked
    for name in next_token_tensors(stored.names(), config.num_layers):
        stored.ignore(name)
    return lambda name: name


def _renaming(skeleton: Any) -> Callable[[str], str | None]:
    """From the name of a stored tensor to that of the model's parameter; None if several tensors become one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(skeleton)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    parameters = skeleton.state_dict()

    def renamed(name: str) -> str | None:
        for some, others in ((renamings, converters), ([], [])):
            found, pattern = rename_source_key(name, some, others, skeleton.base_model_prefix, parameters)
            if found in parameters:
                return None if pattern is not None else found
        return None

    return renamed
