"""A tiny random model whose answers follow a script: a logits processor that every request has forces them.

`client_scripts` has the scripts.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from troupellm.models.sampling.logits_processors import LogitsProcessor
from troupellm.tests.support.clients.client_scripts import answer_of

ROOT = Path(__file__).resolve().parents[3]
CONTEXT = 131_072
END, START, TOOLS, RESULT = "<|im_end|>", "<|im_start|>", "<|tools|>", "<tool_response>"
MARKS = ("<|endoftext|>", START, END, TOOLS, RESULT, "<tool_call>", "</tool_call>", "<think>", "</think>")
VOCABULARY = 8_192
PLUG_IN = ("scripted=troupellm.tests.support.workers.scripted_model:Scripted",)
TEMPLATE = (
    "{%- if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}<|im_end|>\n"
    "{%- elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{%- elif m.role != 'system' or not loop.first %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_scripted_model(folder: Path) -> Path:
    """Write the checkpoint: one small layer, 128 k of context, a tokenizer that was trained on this repository."""
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=MARKS.index(END),
        bos_token_id=None,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    settings = {"eos_token": END, "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def scripted_settings(folder: Path) -> dict[str, Any]:
    """Settings of an engine whose every answer follows the scripts."""
    arguments = json.dumps({"folder": str(folder)})
    return {"logits_processors": PLUG_IN, "default_logits_processors": (f"scripted={arguments}",)}


class Scripted(LogitsProcessor):
    """Allows the script's next token alone."""

    def prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if not Path(arguments.get("folder", "")).joinpath("tokenizer.json").is_file():
            raise ValueError("folder must be that of the model")
        return arguments

    def apply(self, logits, rows):
        for place, row in enumerate(rows):
            known = row.num_prompt_tokens
            wanted = row.options.get("wanted")
            if wanted is None:  # depends on the prompt alone
                wanted = row.options["wanted"] = forced_ids(row.options["folder"], row.tokens[:known].tolist())
            said = row.tokens.numel() - known
            token = wanted[min(said, len(wanted) - 1)]
            kept = logits[place, token].item()
            if kept != -torch.inf:  # a guide decides
                logits[place] = -torch.inf
                logits[place, token] = kept
        return logits


def forced_ids(folder: str, prompt: list[int]) -> list[int]:
    tokenizer = _loaded(folder)
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    answer = answer_of(text, user=f"{START}user\n", tools=TOOLS, result=RESULT)
    ids: list[int] = tokenizer.encode(answer + END, add_special_tokens=False).ids
    return ids


@lru_cache(maxsize=1)
def _loaded(folder: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(mark, special=mark in MARKS[:4]) for mark in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    files = [ROOT / "README.md", *sorted((ROOT / "server").rglob("*.py"))]
    tokenizer.train([str(file) for file in files], trainer)
    return tokenizer
