"""Train the byte-level BPE tokenizer on the generated corpus and write it beside the weights."""

import argparse
import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from troupellm.training import corpus
from troupellm.training.documents import (
    CALL_END,
    CALL_START,
    END_OF_TEXT,
    TOOLS_AFTER,
    TOOLS_BEFORE,
    TURN_END,
    TURN_START,
)

WEIGHTS = Path(__file__).parents[1] / "models" / "builtin" / "weights"
VOCABULARY = 2048
# Words with the character before them, single digits, runs of signs, line ends, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}"
    "{%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}"
    "{{- BEFORE }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- AFTER + '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant' }}"
    "{%- if message.content or not message.tool_calls %}"
    "{{- '\\n' + (message.content or '') }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{%- if call.arguments is string %}{{- call.arguments }}"
    "{%- else %}{{- call.arguments | tojson }}{%- endif %}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def chat_template() -> str:
    """The chat template, with the tools section taken from where the training text takes it."""

    def literal(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("\n", "\\n").replace("'", "\\'") + "'"

    text = TEMPLATE.replace("BEFORE", literal(TOOLS_BEFORE))
    return text.replace("AFTER", literal(TOOLS_AFTER))


def train(documents: int, seed: int) -> Tokenizer:
    """A tokenizer trained on the first ``documents`` documents of a seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        min_frequency=2,
        show_progress=True,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    stream = itertools.islice(corpus.documents(seed), documents)
    texts = ("".join(piece.text for piece in pieces) for pieces in stream)
    marks = (*SPECIAL, CALL_START, CALL_END)

    def plain(text: str) -> str:
        for mark in marks:
            text = text.replace(mark, "\n")
        return text

    tokenizer.train_from_iterator(map(plain, texts), trainer)
    tokenizer.add_tokens([AddedToken(CALL_START, normalized=False)])
    tokenizer.add_tokens([AddedToken(CALL_END, normalized=False)])
    return tokenizer


def main() -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--documents", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    tokenizer = train(options.documents, options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.output / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template(),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (options.output / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
