"""Names of architectures that published config.json files have and transformers has not, with their own keys."""

from typing import NamedTuple


class Spelling(NamedTuple):
    """The meaning of a published name."""

    architecture: str
    """Name in transformers."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Keys of the published config.json, and the keys that have their values in that architecture."""


SPELLINGS = {
    "LLaMAForCausalLM": Spelling("LlamaForCausalLM"),
    "AquilaForCausalLM": Spelling("LlamaForCausalLM"),
    "AquilaModel": Spelling("LlamaForCausalLM"),
    "XverseForCausalLM": Spelling("LlamaForCausalLM"),
    "InternLMForCausalLM": Spelling("LlamaForCausalLM", (("bias", "attention_bias"),)),
    "InternLM3ForCausalLM": Spelling("LlamaForCausalLM", (("bias", "attention_bias"), ("bias", "mlp_bias"))),
    "MiMoForCausalLM": Spelling("Qwen2ForCausalLM"),
    "PhiMoEForCausalLM": Spelling("PhimoeForCausalLM"),
    "Ernie4_5_ForCausalLM": Spelling("Ernie4_5ForCausalLM"),
    "ExaoneMoEForCausalLM": Spelling("ExaoneMoeForCausalLM"),
    "BertForPreTraining": Spelling("BertForMaskedLM"),
}
