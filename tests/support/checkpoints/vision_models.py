"""Small random checkpoints of models that see images, with all files that their processors read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from troupellm.tests.support.checkpoints.byte_tokenizer import write_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8,
}  # fmt: skip
PLAIN = 259
"""Tokens without those of images."""
IMAGE = "<image>"
SMOL_TOKENS = (
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""Shows the images of a message before its texts, as LLaVA's own template does."""
SMOL_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}<image>{% endif %}{% endfor %}"
    "{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_llava(folder: Path) -> None:
    """LLaVA 1.5: nine embeddings per image."""
    tokens = _write_tokens(folder, LLAVA_TEMPLATE, (IMAGE,))
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=24, projection_dim=16),
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=tokens),
        image_token_index=PLAIN,
    )
    _save(transformers.LlavaForConditionalGeneration, config, folder)
    _write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
            "image_mean": [0.48, 0.46, 0.41],
            "image_std": [0.27, 0.26, 0.28],
            "processor_class": "LlavaProcessor",
        },
    )
    _write(
        folder,
        "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": IMAGE,
        },
    )


def write_smolvlm(folder: Path) -> None:
    """Idefics 3's architecture: four embeddings per tile, and tiles as the image's shape wants them."""
    tokens = _write_tokens(folder, SMOL_TEMPLATE, (IMAGE, *SMOL_TOKENS))
    config = transformers.Idefics3Config(
        vision_config={**VISION, "image_size": 32},
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=tokens),
        image_token_id=PLAIN,
        scale_factor=2,
    )
    _save(transformers.Idefics3ForConditionalGeneration, config, folder)
    _write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "do_image_splitting": True,
            "do_pad": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Idefics3Processor",
        },
    )
    _write(folder, "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 4})


def reference(folder: Path, messages: Sequence[Any], images: Sequence[Image.Image], most: int) -> tuple[list[int], ...]:
    """The token ids of a prompt, and those that the model writes behind it, as `transformers` has both."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(images=list(images) or None, text=text, return_tensors="pt", add_special_tokens=False)
    ends = {"eos_token_id": None, "pad_token_id": 0, "min_new_tokens": most}
    with torch.inference_mode():
        whole = model.generate(**inputs, do_sample=False, max_new_tokens=most, **ends)
    prompt = inputs["input_ids"][0].tolist()
    return prompt, whole[0].tolist()[len(prompt) :]


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Random pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy(), "RGB")


def _write_tokens(folder: Path, template: str, more: Sequence[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, PLAIN)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in more])
    tokenizer.save(path)
    _write(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "chat_template": template,
        },
    )
    return tokenizer.get_vocab_size()


def _save(kind: Any, config: Any, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = kind(config).eval()
        for weight in model.parameters():
            weight.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)


def _write(folder: Path, name: str, values: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(values), encoding="utf-8")
