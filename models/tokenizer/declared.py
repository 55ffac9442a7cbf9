"""Tokenizer classes whose rules replace those of tokenizer.json: LlamaTokenizer and GemmaTokenizer, as transformers 5
has them (`AutoTokenizer.from_pretrained` says when; the classes' `__init__` says which rules)."""

from typing import Any, Literal

Declared = Literal["llama", "gemma"]

_CLASSES: dict[str, Declared] = {
    "LlamaTokenizer": "llama", "LlamaTokenizerFast": "llama", "GemmaTokenizer": "gemma", "GemmaTokenizerFast": "gemma",
}  # fmt: skip
_FILE_RULES = frozenset(
    {
        "arctic", "chatlm", "ernie4_5", "ernie4_5_moe", "fuyu", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
        "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "h2ovl_chat",
        "hyperclovax", "hyperclovax_vlm", "internlm2", "internlm3", "iquestcoder", "jamba", "kimi_linear",
        "llava", "llava_next", "mimo_v2_flash", "minicpm3", "minicpmv", "minimax_m2", "ministral",
        "ministral3", "mistral", "mistral3", "mixtral", "modernbert", "modernbert-decoder", "molmo",
        "molmo2", "nemotron", "nvfp4", "olmo2", "olmo3", "olmo_hybrid", "opencua", "openvla",
        "paddleocr_vl", "persimmon", "phi3", "phi3_v", "phimoe", "pixtral", "stablelm", "step3_vl",
        "vipllava",
    }
)  # fmt: skip
"""Model types whose repositories often declare a wrong class: transformers takes tokenizer.json as it is."""
_QWEN2 = "qwen2"
"""As the one above, but a declared LlamaTokenizer stands for Qwen2's."""


def declared(settings: dict[str, Any], config: dict[str, Any], definition: bytes | None) -> Declared | None:
    """The class whose rules count, or none where tokenizer.json's do.

    Args:
        settings: tokenizer_config.json.
        config: config.json.
        definition: tokenizer.json, if there is one.
    """
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    kind = _CLASSES.get(named) if isinstance(named, str) else None
    model_type = config.get("model_type")
    if kind is None or model_type in _FILE_RULES or model_type == _QWEN2:
        return None
    if kind == "llama" and definition is not None and b'"ByteLevel"' in definition:
        return None
    return kind


def declared_rules(kind: Declared, settings: dict[str, Any]) -> dict[str, Any]:
    """Normalizer, pre-tokenizer and decoder of a class, as tokenizer.json spells them."""
    spaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    steps: list[dict[str, Any]] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if kind == "gemma":
        return {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": steps},
        }
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": steps},
    }


def unknown_token(kind: Declared, settings: dict[str, Any]) -> str | None:
    """The model's unknown token: LlamaTokenizer's BPE has none."""
    text = settings.get("unk_token", "<unk>")
    if isinstance(text, dict):
        text = text.get("content")
    return text if kind == "gemma" and isinstance(text, str) else None


def default_names(kind: Declared | None) -> dict[str, str]:
    """Special tokens of a class that its files need not name."""
    if kind is None:
        return {}
    if kind == "llama":
        return {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    }
