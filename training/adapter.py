"""Trains a LoRA adapter of the built-in model with PEFT in seconds: each of its answers begins with a word of yours.

    make peft
    PYTHONPATH=.venv/peft .venv/bin/python -m troupellm.training.adapter ./loras/pirate "Arr!"
    .venv/bin/troupellm serve --enable-lora --lora-dir ./loras

The folder is a model of that server by its name: `"model": "pirate"`.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.training import dialogue
from troupellm.training.documents import Chat, Exchange

IGNORED = -100
"""The label of a token that does not count, as torch has it."""
RATE = 5e-3


def train(folder: Path, word: str, *, steps: int, batch: int, rank: int, seed: int) -> float:
    """Train and save an adapter. Returns the loss of the last step.

    Args:
        word: the beginning of each answer.
        batch: conversations of a step.
    """
    import peft  # not installed with the package
    import transformers

    torch.manual_seed(seed)
    rng, tokenizer = random.Random(seed), transformers.AutoTokenizer.from_pretrained(BUILTIN_FOLDER)
    base = transformers.AutoModelForCausalLM.from_pretrained(BUILTIN_FOLDER, dtype=torch.float32)
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, settings)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=RATE)
    loss = torch.zeros(())
    for _ in range(steps):
        chosen = [dialogue.small_talk(rng) for _ in range(batch)]
        ids, labels = _batch([Exchange(each.user, f"{word} {each.assistant}") for each in chosen], tokenizer)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    model.save_pretrained(folder)
    return float(loss)


def _batch(exchanges: list[Exchange], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [batch, tokens], and the labels of those that the assistant says."""
    rows: list[tuple[list[int], list[int]]] = []
    for exchange in exchanges:
        chat = Chat()
        chat.ask(exchange)
        ids: list[int] = []
        labels: list[int] = []
        for piece in chat.pieces():
            tokens = tokenizer.encode(piece.text, add_special_tokens=False)
            ids += tokens
            labels += tokens if piece.weight == exchange.weight else [IGNORED] * len(tokens)
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    padded = [(ids + [0] * (longest - len(ids)), labels + [IGNORED] * (longest - len(labels))) for ids, labels in rows]
    return torch.tensor([ids for ids, _ in padded]), torch.tensor([labels for _, labels in padded])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="of the adapter, which is made")
    parser.add_argument("word", nargs="?", default="Arr!", help="the beginning of each answer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="conversations of a step")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    loss = train(given.folder, given.word, steps=given.steps, batch=given.batch, rank=given.rank, seed=given.seed)
    print(f"{given.folder}: loss {loss:.3f} after {given.steps} steps")


if __name__ == "__main__":
    main()
