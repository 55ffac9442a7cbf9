"""The text part of a checkpoint that also sees images or hears sound, as the config of a checkpoint of its own.

Text alone goes through the decoder only. Multimodal rotary positions (M-RoPE) give a token of text the same number in
all of their sections, so that they are the plain rotation, in every order of the sections.
"""

from typing import Any

from troupellm.models.config.hf_config import TEXT_PART, ConfigReader, architecture_of
from troupellm.models.config.quantization_section import KEY as QUANTIZATION
from troupellm.models.config.text_section import SECTIONS, text_section

DTYPES = ("dtype", "torch_dtype")
"""Keys that count in the section only where the top level of the file has none."""
TIED = "tie_word_embeddings"
NESTED = (
    "AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration",
    "DeepseekVLForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration", "Glm46VForConditionalGeneration",
    "Idefics3ForConditionalGeneration", "InternVLChatModel", "InternVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration", "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration", "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "Qwen2AudioForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel", "Qwen2_5OmniThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration", "VipLlavaForConditionalGeneration", "VoxtralForConditionalGeneration",
)  # fmt: skip
"""Architectures around a decoder that has a section of its own."""
FLAT = {
    "Glm4vForConditionalGeneration": "glm4v_text", "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "LlavaLlamaForCausalLM": "llama", "LlavaMistralForCausalLM": "mistral", "LlavaQwenForCausalLM": "qwen2",
    "MiniCPMV": "", "Phi4MMForCausalLM": "phi3", "Phi4MultimodalForCausalLM": "phi3",
    "Qwen2VLForConditionalGeneration": "qwen2", "Qwen2_5_VLForConditionalGeneration": "qwen2",
}  # fmt: skip
"""Architectures whose files may have the decoder's keys at the top level, and its type."""
MINICPM_V = {
    "2.0": "minicpm",
    "2": "minicpm",
    "2.5": "llama",
    "2.6": "qwen2",
    "4.0": "llama",
    "4": "llama",
    "4.5": "qwen3",
}
"""The decoder's type by `version`."""
SAME_TYPES = {
    "glm4v_moe_text": "glm4_moe", "glm4v_text": "glm4", "kimi_k2": "deepseek_v3", "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe", "qwen3_5_text": "qwen3_5", "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}  # fmt: skip
"""Types of sections, and of the decoders that they are."""
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen2_5_omni_text": {"rope_theta": 1e6},
    "qwen2_5_vl_text": {"rms_norm_eps": 1e-05, "rope_theta": 1e6},
    "qwen2_vl_text": {"rms_norm_eps": 1e-05, "rope_theta": 1e6},
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_omni_moe_text": {"rope_theta": 1e6, "norm_topk_prob": True},
    "qwen3_vl_moe_text": {"rope_theta": 5e5},
    "qwen3_vl_text": {"rope_theta": 5e5, "head_dim": 128},
    "glm4v_text": {"rms_norm_eps": 1e-05, "head_dim": None},
    "glm4v_moe_text": {"attention_bias": True},
}  # fmt: skip
"""Values that `transformers` assumes where a section of that type has none: older files store the others alone."""


def is_wrapper(architecture: str) -> bool:
    """True for an architecture whose text part may be served."""
    return architecture in NESTED or architecture in FLAT


def text_document(reader: ConfigReader) -> tuple[ConfigReader, str]:
    """The text part of a wrapper as a config of its own, without `architectures`, and the decoder's type.

    Raises:
        ModelLoadError: the file does not say what its decoder is.
    """
    wrapper, section = architecture_of(reader), text_section(reader)
    if section.values:
        if not isinstance(kind := section.values.get("model_type"), str) or not kind:
            raise section.refuse("model_type", "must name the decoder's type")
    elif wrapper in NESTED:
        raise reader.refuse(SECTIONS[0][0], f"must describe the decoder of {wrapper}")
    else:
        section, kind = reader, FLAT[wrapper] or _by_version(reader)
    document = section.without("architectures").without(QUANTIZATION).with_defaults(**DEFAULTS.get(kind, {}))
    if any(reader.has(key) for key in DTYPES):
        document = document.without(DTYPES[0]).without(DTYPES[1])
        document = document.with_values(**{key: reader.values[key] for key in DTYPES if reader.has(key)})
    # A level that says so counts, since a head that is stored and differs is used all the same.
    levels = [level.values[TIED] for level in (section, reader) if level.has(TIED)]
    if levels:
        document = document.with_values(**{TIED: next((said for said in levels if said is not False), False)})
    document = document.with_values(**{TEXT_PART: wrapper}).with_section_of(QUANTIZATION, reader)
    return document, SAME_TYPES.get(kind, kind)


def _by_version(reader: ConfigReader) -> str:
    version = str(reader.values.get("version"))
    if version not in MINICPM_V:
        raise reader.refuse("version", f"must be one of {', '.join(MINICPM_V)}")
    return MINICPM_V[version]
