"""Text parts of checkpoints that also see images, in eight bits: by a family of ours, and by `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from troupellm.tests.support.checkpoints.text_parts import PIXTRAL, SIGLIP, TEXT
from troupellm.tests.support.quantized.fp8_files import e4m3_by_tensor
from troupellm.tests.support.quantized.quantized_llama import check_tokens, load, tokens_of

FILE = "model.safetensors"
WHOLE: dict[str, Any] = {**TEXT, "intermediate_size": 128, "pad_token_id": None}
PUBLISHED = {
    "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head", "model.vision_tower"],
}  # fmt: skip
"""Of Ministral 3."""


def mistral3() -> Any:
    text = {**WHOLE, "model_type": "ministral3", "sliding_window": None}
    return transformers.Mistral3Config(text_config=text, vision_config=PIXTRAL, tie_word_embeddings=False)


def aya_vision() -> Any:
    text = {**WHOLE, "model_type": "cohere2", "sliding_window": 20, "tie_word_embeddings": True}
    return transformers.AyaVisionConfig(text_config=text, vision_config=SIGLIP, tie_word_embeddings=True)


def written(folder: Path, config: Any) -> tuple[Path, Any]:
    """The checkpoint with a factor for each weight of the text part, and the whole model that it stands for."""
    torch.manual_seed(4)
    plain, quantized = folder / "plain", folder / "quantized"
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(plain)
    tensors, stored = load_file(plain / FILE), {}
    for name, tensor in list(tensors.items()):
        layer = name.removesuffix(".weight")
        if "language_model" in name and layer.endswith("_proj"):
            parts, tensors[name] = e4m3_by_tensor(tensor, "weight_scale_inv", ("activation_scale",))
            stored |= {f"{layer}.{key}": part.bfloat16() if part.ndim == 0 else part for key, part in parts.items()}
            tensors[name] = parts["weight"].float() * parts["weight_scale_inv"].bfloat16().float()
        else:
            stored[name] = tensor
    assert any(name.endswith("weight_scale_inv") for name in stored)
    save_file(tensors, plain / FILE, metadata={"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / FILE, metadata={"format": "pt"})
    values = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(values | {"quantization_config": PUBLISHED}))
    return quantized, transformers.AutoModelForImageTextToText.from_pretrained(plain).eval()


@pytest.mark.parametrize(
    ("config", "impl", "said"),
    [
        (mistral3, "auto", "products: 8 fp8, 1 plain"),
        (aya_vision, "auto", "products: 8 fp8, 1 plain"),
        (aya_vision, "transformers", "products: 14 fp8, 1 plain"),
    ],
)
def test_text_in_eight_bits_is_the_whole_model_in_text(tmp_path: Path, config: Any, impl: str, said: str) -> None:
    folder, model = written(tmp_path, config())
    worker, seen = load(folder, model_impl=impl)
    check_tokens(model, tokens_of(worker))
    worker.close()
    details = [progress.detail for progress in seen]
    assert said in details
    assert any("by the code of transformers" in detail for detail in details) == (impl == "transformers")
    assert any("calibrated input scales are not used" in detail for detail in details)
