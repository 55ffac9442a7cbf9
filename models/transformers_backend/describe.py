"""Describes a model of `transformers` to the engine, from a copy of the model that is built without memory."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from troupellm.models.config.decoder_config import DecoderConfig, LayerShape
from troupellm.models.config.hf_config import DTYPES, FILE, TEXT_PART, ConfigReader, architecture_of
from troupellm.models.config.quantization_section import KEY as QUANTIZATION
from troupellm.models.config.transformers_package import INSTALL, has_transformers
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.model_folder import check_file
from troupellm.models.transformers_backend import attention
from troupellm.models.transformers_backend.attention import AttentionCall
from troupellm.protocol.errors import ModelLoadError

TOKENS = 3
NO_INTERFACE = "not all of its layers attend by the interface of transformers"
KINDS = ("full_attention", "sliding_attention")


def knows(reader: ConfigReader) -> bool:
    """True if `transformers` is installed and has this decoder. Imports it."""
    return knows_name(architecture_of(reader))


def knows_name(architecture: str) -> bool:
    """As `knows`, by name."""
    return has_transformers() and _model_class(architecture) is not None


def causal_architecture(model_type: str) -> str | None:
    """The decoder that writes of that type; None where `transformers` is missing or has none. Imports it."""
    if not has_transformers():
        return None
    from transformers.models.auto import modeling_auto

    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name if isinstance(name, str) else None


def describe(folder: Path, reader: ConfigReader) -> DecoderConfig:
    """Describe a decoder that `transformers` runs.

    Raises:
        ModelLoadError: `transformers` is missing or has no such decoder, or one that does not go with paged attention.
    """
    architecture = architecture_of(reader)
    if not has_transformers():
        raise ModelLoadError("model_impl transformers needs the package transformers", hint=INSTALL)
    if (folder / "adapter_config.json").exists():
        raise ModelLoadError("adapter_config.json: adapters are not supported", hint="serve the merged model")
    text_part = reader.has(TEXT_PART)
    config = hf_config(folder, text_part=text_part)
    skeleton = make_skeleton(architecture, config)
    calls, hidden_size = _probe(skeleton, architecture)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise ModelLoadError(f"{FILE}: max_position_embeddings is missing", hint="the context's length is not known")
    dtype_key = "dtype" if reader.has("dtype") else "torch_dtype"
    return DecoderConfig(
        architecture=architecture,
        vocab_size=int(text.vocab_size),
        hidden_size=hidden_size,
        layers=tuple(
            LayerShape(
                num_heads=call.query.shape[1],
                num_kv_heads=call.key.shape[1],
                head_dim=call.key.shape[3],
                window=window,
                intermediate_size=_widest(text) or 4 * hidden_size,
            )
            for call, window in zip(calls, _windows(text, calls, architecture), strict=True)
        ),
        rms_norm_eps=1e-6,
        max_position_embeddings=longest,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        checkpoint_dtype=reader.choice(dtype_key, DTYPES, "float32"),
        head="lm" if _writes(architecture) else "none",
        text_part=text_part,
        implementation="transformers",
        num_parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
    )


def hf_config(folder: Path, *, text_part: bool = False) -> Any:
    """config.json, or what a GGUF file says instead, as `transformers` reads it; code in the folder is never run.

    The quantization section is left out: stored formats are read here, by our own readers.

    Args:
        text_part: the section of the decoder alone, of a model with other parts.

    Raises:
        ModelLoadError: it cannot be read, or is a link out of the folder.
    """
    for file in folder.glob("config*.json"):  # there may be others for some versions
        check_file(file)
    import transformers

    try:
        if is_gguf(folder):
            values = dict(ConfigReader.load(folder).values)
            return transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"{FILE} cannot be read by transformers: {_short(error)}") from error
    for part in (config, getattr(config, "text_config", None)):
        if hasattr(part, QUANTIZATION):
            delattr(part, QUANTIZATION)
    return config.get_text_config() if text_part else config


def make_skeleton(architecture: str, config: Any) -> Any:
    """The model with shapes and no numbers.

    Raises:
        ModelLoadError: there is no such decoder.
    """
    found = _model_class(architecture)
    if found is None:
        raise ModelLoadError(
            f"{FILE}: architecture {architecture} is no decoder of transformers",
            hint="code that a checkpoint brings along is never run",
        )
    if getattr(config, "is_encoder_decoder", False) or found._is_stateful:
        raise ModelLoadError(f"{architecture} has more to remember than keys and values; it is not supported")
    attention.register()
    try:
        with torch.device("meta"):
            # In bfloat16, since torch's grouped products know no other type where there are no numbers.
            model = found._from_config(config, attn_implementation=attention.PROBE, dtype=torch.bfloat16)
    except KeyError as error:  # from a table of attention classes that the model has of its own
        if attention.PROBE not in str(error):
            raise ModelLoadError(f"{architecture} cannot be built by transformers: {_short(error)}") from error
        raise ModelLoadError(f"{architecture} does not go with paged attention: {NO_INTERFACE}") from error
    except Exception as error:
        raise ModelLoadError(f"{architecture} cannot be built by transformers: {_short(error)}") from error
    return prepared(model)


def prepared(model: Any) -> Any:
    """The model for use: not in training, and without the look at all token ids for padding, of which there is none."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    return model.eval()


def body_name(model: Any) -> str | None:
    """The attribute with the part below the head; None of a model without a head."""
    from transformers import PreTrainedModel

    names = (model.base_model_prefix, "model")
    return next((name for name in names if isinstance(getattr(model, name, None), PreTrainedModel)), None)


def body_of(model: Any) -> Any:
    """The part without the head."""
    name = body_name(model)
    return model if name is None else getattr(model, name)


def _writes(architecture: str) -> bool:
    from transformers.models.auto import modeling_auto

    return architecture in _names(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _names(mapping: Any) -> set[str]:
    return {name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)}


def _model_class(architecture: str) -> Any:
    """The class of that name if it is a decoder, with or without a head that writes."""
    import transformers
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    bare = {key: modeling_auto.MODEL_MAPPING_NAMES[key] for key in known if key in modeling_auto.MODEL_MAPPING_NAMES}
    if architecture not in _names(known) | _names(bare):
        return None
    found = getattr(transformers, architecture, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def _probe(skeleton: Any, architecture: str) -> tuple[list[AttentionCall], int]:
    """Every layer's attention, in order, and the size of a hidden state."""
    calls: dict[int, AttentionCall] = {}
    repeated = False

    def record(call: AttentionCall) -> Tensor:
        nonlocal repeated
        repeated |= call.layer in calls
        calls[call.layer] = call
        return call.query.new_empty(call.query.shape[2], call.query.shape[1], call.value.shape[3])

    ids, positions = (torch.zeros(1, TOKENS, dtype=torch.long, device="meta") for _ in range(2))
    try:
        with torch.inference_mode(), attention.answering(record):
            # With a mask of nothing, since masks are else compared with positions, which have no numbers here.
            mask = torch.ones_like(ids)
            output = body_of(skeleton)(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
    except ModelLoadError as error:
        raise ModelLoadError(f"{architecture} does not go with paged attention: {error.message}") from error
    except Exception as error:
        raise ModelLoadError(f"{architecture} does not go with paged attention: {_short(error)}") from error
    num_layers = skeleton.config.get_text_config().num_hidden_layers
    if repeated:
        raise ModelLoadError(f"{architecture} does not go with paged attention: a layer attends more than once")
    if sorted(calls) != list(range(num_layers)):
        raise ModelLoadError(f"{architecture} does not go with paged attention: {NO_INTERFACE}")
    found = [calls[layer] for layer in range(num_layers)]
    if any(call.value.shape[3] > call.key.shape[3] for call in found):
        raise ModelLoadError(f"{architecture} does not go with paged attention: its values are longer than its keys")
    return found, int(output.last_hidden_state.shape[-1])


def _widest(text: Any) -> int:
    """Largest width of the layers' feed-forwards; 0 if none is given."""
    said = getattr(text, "intermediate_size", None) or 0
    return max(map(int, said)) if isinstance(said, list | tuple) else int(said)


def _windows(text: Any, calls: list[AttentionCall], architecture: str) -> tuple[int | None, ...]:
    """The window of every layer's mask. Raises ModelLoadError: layers of an unknown kind."""
    unknown = [kind for kind in getattr(text, "layer_types", None) or () if kind not in KINDS]
    if unknown:
        raise ModelLoadError(f"{architecture}: layer_types: {unknown[0]} is not supported")
    return tuple(call.window for call in calls)


def _short(error: Exception) -> str:
    """The first line of its text, cut to a length."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
