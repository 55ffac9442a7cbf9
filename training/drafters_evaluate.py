"""Mean acceptance length of each drafter per kind of held-out prompt, greedy.

``python -m troupellm.training.drafters_evaluate`` lets the built-in model answer, and then walks through
every answer as verification would: how many of the next drafts are what the model says, one token more, on from there.
A chain counts only as far as it is right, and up to there its inputs are the model's own text; so one run over the
whole answer shows what a drafter would have said after every token of it, without drafting step by step.

Answers in which the model loops until the limit ("Gina Gina Gina ...") are counted and left out: a single one has as
many tokens as twenty others, and says little of them.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from troupellm.training import dialogue, evaluate, stories
from troupellm.training.batches import token_id
from troupellm.training.documents import END_OF_TEXT, TURN_END, TURN_START, Chat, Exchange
from troupellm.training.drafters_data import pupils
from troupellm.training.drafters_network import HEADS, Eagle, Medusa
from troupellm.training.drafters_served import ask
from troupellm.training.drafters_tally import Tally
from troupellm.training.drafters_texts import Generator, Prompt, Text
from troupellm.training.network import Network

DRAFTERS = Path(__file__).parents[1] / "models" / "builtin" / "drafters"
GROUP = 32
LIMIT = 450
KINDS: dict[str, tuple[str, ...]] = {
    "arithmetic": ("sums", "differences"),
    "facts": ("facts, combinations", "facts, openers", "facts, phrases"),
    "JSON": ("json simple", "json valid", "json extraction"),
    "tool calls": ("tool calls", "tool calls, own names"),
}
"""The kinds of the table, and which tasks of the model's own evaluation they are drawn from."""


def prompts(count: int, seed: int = 7) -> dict[str, list[str]]:
    """About ``count`` prompts of every kind, from the held-out parts where there are such, else fresh draws."""
    rng = random.Random(f"acceptance {seed}")
    cases = evaluate.cases(count, seed)
    out = {"stories": [_prompt(stories.exchange(rng)) for _ in range(count)]}
    for kind, tasks in KINDS.items():
        asked = [case.prompt for task in tasks for case in cases[task]]
        out[kind] = rng.sample(asked, min(count, len(asked)))
    out["chat"] = [_prompt(dialogue.exchange(rng)) for _ in range(count)]
    return out


def _prompt(asked: Exchange) -> str:
    chat = Chat()
    chat.ask(asked)
    text = "".join(piece.text for piece in chat.pieces())
    mark = f"{TURN_START}assistant\n"
    return text[: text.index(mark) + len(mark)]


def answers(generator: Generator, tokenizer: Tokenizer, asked: list[str]) -> list[Text]:
    """The model's greedy answer to each prompt; answers that do not end are left out."""
    ends = [token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)]
    todo = sorted((Prompt(tokenizer.encode(text).ids, LIMIT) for text in asked), key=lambda prompt: len(prompt.ids))
    out: list[Text] = []
    for at in range(0, len(todo), GROUP):
        group = todo[at : at + GROUP]
        said = generator.write(group, torch.Generator().manual_seed(0))
        both = zip(group, said, strict=True)
        out += [Text(prompt.ids + ids, len(prompt.ids)) for prompt, ids in both if ids[-1] in ends]
    return out


@torch.no_grad()
def right(target: Network, drafter: nn.Module, tokens: Tensor, depth: int) -> Tensor:
    """Where each link of a chain would foretell the token that is there, [rows, depth, length].

    Entry [row, link, at] is about token ``at``, foretold by link ``link`` when all links before it were right.
    """
    out = torch.zeros((tokens.shape[0], depth, tokens.shape[1]), dtype=torch.bool)
    if isinstance(drafter, Eagle):
        chain = drafter.chain(target.embedding(tokens)[:, 1:], target(tokens)[:, :-1], depth)
        for link, features in enumerate(chain):
            out[:, link, 2:] = target.logits(features[:, :-1]).argmax(-1) == tokens[:, 2:]
    elif isinstance(drafter, Medusa):
        features = target(tokens)
        for head in range(min(depth, HEADS)):
            said = target.logits(drafter(features[:, : -2 - head], head)).argmax(-1)
            out[:, head, 2 + head :] = said == tokens[:, 2 + head :]
    else:
        assert isinstance(drafter, Network)
        out[:, :, 1:] = (drafter.logits(drafter(tokens[:, :-1])).argmax(-1) == tokens[:, 1:])[:, None]
    return out


def walk(hits: Tensor, text: Text, depth: int) -> Tally:
    """Verification after verification through one answer; the prompt gives its first token without drafts.

    Args:
        hits: of this text, as `right` gives them, [depth, length].
        text: prompt and answer.
        depth: drafts of a verification.
    """
    tally, newest, last = Tally(), text.start, len(text.ids) - 1
    while newest < last:
        kept = 0
        while kept < min(depth, last - newest) and bool(hits[kept, newest + 1 + kept]):
            kept += 1
        tally.verified += 1
        tally.accepted += kept
        newest += kept + 1
    return tally


def measure(target: Network, drafter: nn.Module, texts: list[Text], depth: int, pad: int) -> Tally:
    """Over all of these texts."""
    total = Tally()
    ordered = sorted(texts, key=lambda text: len(text.ids))
    for at in range(0, len(ordered), GROUP):
        group = ordered[at : at + GROUP]
        width = len(group[-1].ids)
        tokens = torch.tensor([text.ids + [pad] * (width - len(text.ids)) for text in group])
        for hits, text in zip(right(target, drafter, tokens, depth), group, strict=True):
            found = walk(hits, text, depth)
            total.verified += found.verified
            total.accepted += found.accepted
    return total


def load_drafters(target: Network, folder: Path = DRAFTERS) -> dict[str, nn.Module]:
    """The shipped drafters in training form."""
    made = pupils(target)
    load_shipped(made, folder)
    return {name: module.eval() for name, module in made.items()}


def load_shipped(drafters: dict[str, nn.Module], folder: Path) -> None:
    """Give drafters in training form the weights of those in a folder, which has a folder for each."""
    for name, module in drafters.items():
        assert isinstance(module, Eagle | Medusa | Network)
        module.load_checkpoint(load_file(folder / name / "model.safetensors"))


def table(result: dict[str, dict[str, Tally]]) -> str:
    """The result as the card shows it: a row per kind, a column per drafter."""
    names = list(next(iter(result.values())))
    lines = [f"| Kind | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for kind, row in result.items():
        lines.append(f"| {kind} | {' | '.join(f'{row[name].length:.2f}' for name in names)} |")
    return "\n".join(lines) + "\n"


def all_kinds(rows: list[dict[str, Tally]]) -> dict[str, Tally]:
    """The sum over kinds."""
    return {
        name: Tally(sum(row[name].verified for row in rows), sum(row[name].accepted for row in rows))
        for name in rows[0]
    }


def computed(asked: dict[str, list[str]], folder: Path, depth: int) -> dict[str, dict[str, Tally]]:
    """Per kind and drafter, from the training form of the networks."""
    target, tokenizer = evaluate.load(evaluate.WEIGHTS)
    drafters = load_drafters(target, folder)
    generator, pad = Generator(target, tokenizer), token_id(tokenizer, END_OF_TEXT)
    out: dict[str, dict[str, Tally]] = {}
    for kind, group in tqdm(asked.items(), leave=False):
        texts = answers(generator, tokenizer, group)
        tqdm.write(f"{kind}: {len(texts)} of {len(group)} answers end")
        out[kind] = {name: measure(target, one, texts, depth, pad) for name, one in drafters.items()}
    return out


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--drafters", type=Path, default=DRAFTERS)
    parser.add_argument("--count", type=int, default=64, help="prompts of each kind")
    parser.add_argument("--depth", type=int, default=4, help="drafts of a verification")
    parser.add_argument("--server", help="address of a running server to ask instead, see served.py")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", type=Path, help="write a table (.md) and the counts (.json) here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    asked = prompts(options.count)
    if options.server:
        result = {kind: {"served": ask(options.server, group, LIMIT)} for kind, group in tqdm(asked.items())}
    else:
        result = computed(asked, options.drafters, options.depth)
    result["all"] = all_kinds(list(result.values()))
    print(table(result), end="")
    if options.report:
        options.report.with_suffix(".md").write_text(table(result), encoding="utf-8")
        counts = {
            kind: {name: {"verified": one.verified, "accepted": one.accepted} for name, one in row.items()}
            for kind, row in result.items()
        }
        options.report.with_suffix(".json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
