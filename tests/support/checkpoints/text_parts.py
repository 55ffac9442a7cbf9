"""Small random checkpoints of models that also see images or hear sound, as `transformers` and others write them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import transformers

from troupellm.tests.support.checkpoints.decoder_families import (
    EXPERTS,
    GEMMA,
    GEMMA4_SHARED,
    IMAGES,
    LATENT,
    LLAMA4,
    ROUTED,
    SIZES,
)

SECTION = "text_config"
TEXT: dict[str, Any] = {**SIZES, "tie_word_embeddings": False}
ROTATED: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
SEEN: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 14,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "image_size": 28,
}  # fmt: skip
"""The part for images of Qwen's and GLM's models."""
PIXTRAL: dict[str, Any] = {**IMAGES, "head_dim": 8, "model_type": "pixtral"}
CLIP: dict[str, Any] = {**IMAGES, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP: dict[str, Any] = {**IMAGES, "model_type": "siglip_vision_model"}
HEARD: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8,
    "max_source_positions": 16, "output_dim": 64, "n_window": 8,
}  # fmt: skip
OMNI_SEEN: dict[str, Any] = {**SEEN, "fullatt_block_indexes": [0]}
Config = transformers.PretrainedConfig


class TextPart(NamedTuple):
    """A model with other parts."""

    kind: str
    """Class in `transformers`."""
    config: Callable[[], Config]
    decoder: str
    """Architecture of its text part."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Beginnings of names as `transformers` writes them, and as other writers do."""
    moved: tuple[str, ...] | None = None
    """Where other writers have the decoder's section; empty is the top level, None the place of `transformers`."""
    architecture: str = ""
    """The name of the model in the files of other writers, where that differs."""


def sections(m: int, h: int, w: int, **more: Any) -> dict[str, Any]:
    """Rotary parameters in sections for three positions."""
    return {**ROTATED, "mrope_section": [m, h, w], **more}


NEWER = {
    "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
    "audio_tower.": "model.audio_tower.", "image_newline": "model.image_newline",
}  # fmt: skip
"""Names of the present layout of modules."""
INTERNVL = {"vision_tower.": "vision_model.", "multi_modal_projector.": "mlp1."}
QWEN = {"model.": "model.language_model.", "visual.": "model.visual."}
THINKER = {name: f"thinker.{name}" for name in ("model.", "lm_head.", "visual.", "audio_tower.")}
TEXT_PARTS: dict[str, TextPart] = {
    "mistral3": TextPart(
        "Mistral3ForConditionalGeneration",
        lambda: transformers.Mistral3Config(
            text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
            vision_config=PIXTRAL,
            tie_word_embeddings=False,
        ),
        "MistralForCausalLM",
        NEWER,
    ),
    "llava": TextPart(
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(text_config={**TEXT, "model_type": "llama"}, vision_config=CLIP),
        "LlamaForCausalLM",
        NEWER,
    ),
    "llava_next": TextPart(
        "LlavaNextForConditionalGeneration",
        lambda: transformers.LlavaNextConfig(
            text_config={**TEXT, "model_type": "mistral", "sliding_window": 20}, vision_config=CLIP
        ),
        "MistralForCausalLM",
        NEWER,
    ),
    "aya_vision": TextPart(
        "AyaVisionForConditionalGeneration",
        lambda: transformers.AyaVisionConfig(
            # the scale of its logits is 1: around it, transformers forgets that factor
            text_config={**TEXT, "model_type": "cohere2", "sliding_window": 20, "logit_scale": 1.0},
            vision_config=SIGLIP,
            tie_word_embeddings=True,
        ),
        "Cohere2ForCausalLM",
        NEWER,
    ),
    "internvl": TextPart(
        "InternVLForConditionalGeneration",
        lambda: transformers.InternVLConfig(
            text_config={**TEXT, "model_type": "qwen3", "head_dim": 32},
            vision_config={**IMAGES, "image_size": [28, 28], "patch_size": [14, 14]},
            tie_word_embeddings=False,
        ),
        "Qwen3ForCausalLM",
        INTERNVL,
        ("llm_config",),
        "InternVLChatModel",
    ),
    "qwen2_vl": TextPart(
        "Qwen2VLForConditionalGeneration",
        lambda: transformers.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": sections(2, 3, 3)},
            vision_config={**SEEN, "embed_dim": 32, "hidden_size": 64},
            tie_word_embeddings=True,
        ),
        "Qwen2ForCausalLM",
        QWEN,
    ),
    "qwen2_5_vl": TextPart(
        "Qwen2_5_VLForConditionalGeneration",
        lambda: transformers.Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": sections(2, 3, 3)},
            vision_config=OMNI_SEEN,
        ),
        "Qwen2ForCausalLM",
        {},
        (),
    ),
    "qwen3_vl": TextPart(
        "Qwen3VLForConditionalGeneration",
        lambda: transformers.Qwen3VLConfig(
            text_config={**TEXT, "head_dim": 32, "rope_parameters": sections(6, 5, 5, mrope_interleaved=True)},
            vision_config=SEEN,
            tie_word_embeddings=True,
        ),
        "Qwen3ForCausalLM",
    ),
    "qwen3_vl_moe": TextPart(
        "Qwen3VLMoeForConditionalGeneration",
        lambda: transformers.Qwen3VLMoeConfig(
            text_config={
                **EXPERTS,
                "head_dim": 32,
                "tie_word_embeddings": False,
                "rope_parameters": sections(6, 5, 5, mrope_interleaved=True),
            },
            vision_config=SEEN,
        ),
        "Qwen3MoeForCausalLM",
    ),
    "glm4v": TextPart(
        "Glm4vForConditionalGeneration",
        lambda: transformers.Glm4vConfig(
            text_config={**TEXT, "rope_parameters": sections(1, 1, 2, partial_rotary_factor=0.5)}, vision_config=SEEN
        ),
        "Glm4ForCausalLM",
        {},
        (),
    ),
    "glm4v_moe": TextPart(
        "Glm4vMoeForConditionalGeneration",
        lambda: transformers.Glm4vMoeConfig(
            text_config={
                **ROUTED,
                "first_k_dense_replace": 1,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "rope_parameters": sections(2, 3, 3, partial_rotary_factor=0.5),
            },
            vision_config=SEEN,
        ),
        "Glm4MoeForCausalLM",
    ),
    "gemma4": TextPart(
        "Gemma4ForConditionalGeneration",
        lambda: transformers.Gemma4Config(
            text_config=GEMMA4_SHARED,
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "position_embedding_size": 64,
            },
            audio_config=None,
        ),
        "Gemma4ForCausalLM",
    ),
    "llama4": TextPart(
        "Llama4ForConditionalGeneration",
        lambda: transformers.Llama4Config(
            text_config=LLAMA4,
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        ),
        "Llama4ForCausalLM",
    ),
    "gemma3": TextPart(
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(
            text_config={**GEMMA, "sliding_window": 20},
            vision_config=IMAGES,
            tie_word_embeddings=False,
            initializer_range=0.3,
        ),
        "Gemma3ForCausalLM",
        NEWER,
    ),
    "qwen2_5_omni": TextPart(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        lambda: transformers.Qwen2_5OmniThinkerConfig(
            text_config={**TEXT, "rope_parameters": sections(2, 3, 3)},
            vision_config=OMNI_SEEN,
            audio_config=HEARD,
            initializer_range=0.3,
        ),
        "Qwen2ForCausalLM",
        THINKER,
        ("thinker_config", "text_config"),
        "Qwen2_5OmniModel",
    ),
    "qwen3_omni_moe": TextPart(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        lambda: transformers.Qwen3OmniMoeThinkerConfig(
            text_config={
                **EXPERTS,
                "head_dim": 32,
                "tie_word_embeddings": False,
                "rope_parameters": sections(6, 5, 5, mrope_interleaved=True),
            },
            vision_config=SEEN,
            audio_config={**HEARD, "downsample_hidden_size": 8},
            initializer_range=0.3,
        ),
        "Qwen3MoeForCausalLM",
        THINKER,
        ("thinker_config", "text_config"),
        "Qwen3OmniMoeForConditionalGeneration",
    ),
    "smolvlm": TextPart(
        "SmolVLMForConditionalGeneration",
        lambda: transformers.SmolVLMConfig(text_config={**TEXT, "model_type": "llama"}, vision_config=IMAGES),
        "LlamaForCausalLM",
    ),
    "idefics3": TextPart(
        "Idefics3ForConditionalGeneration",
        lambda: transformers.Idefics3Config(text_config={**TEXT, "model_type": "llama"}, vision_config=IMAGES),
        "LlamaForCausalLM",
    ),
    "voxtral": TextPart(
        "VoxtralForConditionalGeneration",
        lambda: transformers.VoxtralConfig(
            text_config={**TEXT, "model_type": "llama"},
            audio_config={
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_mel_bins": 8,
                "max_source_positions": 16,
            },
        ),
        "LlamaForCausalLM",
        NEWER,
    ),
    "deepseek_vl": TextPart(
        "DeepseekVLForConditionalGeneration",
        lambda: transformers.DeepseekVLConfig(
            text_config={**TEXT, "model_type": "llama"}, vision_config=SIGLIP, tie_word_embeddings=False
        ),
        "LlamaForCausalLM",
    ),
    "lighton_ocr": TextPart(
        "LightOnOcrForConditionalGeneration",
        lambda: transformers.LightOnOcrConfig(
            text_config={**TEXT, "model_type": "qwen3", "head_dim": 32},
            vision_config=PIXTRAL,
            tie_word_embeddings=False,
        ),
        "Qwen3ForCausalLM",
    ),
    "kimi_k25": TextPart(
        "DeepseekV3ForCausalLM",
        lambda: transformers.DeepseekV3Config(
            **LATENT, q_lora_rank=40, first_k_dense_replace=1, n_group=1, topk_group=1, num_mtp_layers=0
        ),
        "DeepseekV3ForCausalLM",
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        ("text_config",),
        "KimiK25ForConditionalGeneration",
    ),
    "minicpm_v": TextPart(
        "Qwen2ForCausalLM",
        lambda: transformers.Qwen2Config(**TEXT, version=2.6),
        "Qwen2ForCausalLM",
        {"model.": "llm.model.", "lm_head.": "llm.lm_head."},
        None,
        "MiniCPMV",
    ),
    "phi4_multimodal": TextPart(
        "Phi3ForCausalLM",
        lambda: transformers.Phi3Config(**TEXT),
        "Phi3ForCausalLM",
        {},
        None,
        "Phi4MMForCausalLM",
    ),
}
AROUND_TEXT = ("kimi_k25", "minicpm_v", "phi4_multimodal")
"""Decoders that their publishers' code wraps around: `transformers` does not write such files."""
