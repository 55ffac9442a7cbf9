"""Writes the built-in model's own answers, the text from which its drafters learn.

``python -m troupellm.training.drafters_texts --folder outputs --shards 8`` asks the model prompts of its
training mixture and keeps the prompts with its own answers, most of them greedy, some sampled. A drafter that learned
from the training text would imitate people; it must instead predict this model.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from troupellm.training import arithmetic, corpus, stories
from troupellm.training.batches import token_id
from troupellm.training.corpus import Make
from troupellm.training.documents import END_OF_TEXT, TURN_END, TURN_START, Piece
from troupellm.training.evaluate import WEIGHTS, load
from troupellm.training.network import Block, Network, norm

GROUP = 96
POOL = GROUP * 12
# The most tokens of a prompt, of an answer, and of the continuation of a text that is no conversation.
PROMPT, ANSWER, CONTINUATION = 448, 320, 128
# The share of texts that the model samples instead of taking the likeliest token.
SAMPLED = 0.15
# Shares of prompts in the first shards and in the later ones. Stories are long and soon learned; the first drafters
# were weakest at short answers, of which the later shards have more.
MIXTURE: tuple[tuple[Make, float, float], ...] = (
    (corpus.single, 0.22, 0.36),
    (corpus.several, 0.08, 0.10),
    (corpus.objects, 0.24, 0.20),
    (corpus.calls, 0.14, 0.18),
    (corpus.story_chat, 0.14, 0.03),
    (corpus.copying, 0.05, 0.05),
    (corpus.counting, 0.05, 0.02),
    (corpus.reading, 0.03, 0.02),
    (stories.raw, 0.03, 0.01),
    (arithmetic.drill, 0.01, 0.02),
    (corpus.foreign, 0.01, 0.01),
)
FIRST_SHARDS = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a prompt, how many tokens may follow, and the temperature at which they are drawn."""

    ids: list[int]
    limit: int
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the model wrote after it; ``start`` is the index of its first own token."""

    ids: list[int]
    start: int


class Generator:
    """Writes the continuations of a group of prompts at once, with a cache in place."""

    def __init__(self, network: Network, tokenizer: Tokenizer) -> None:
        self._network = network
        self._ends = torch.tensor([token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)])

    @torch.no_grad()
    def write(self, prompts: list[Prompt], noise: torch.Generator) -> list[list[int]]:
        """The model's continuation of each prompt, with the end mark if the model wrote one."""
        shape, rows = self._network.shape, len(prompts)
        width = max(len(prompt.ids) for prompt in prompts)
        limits = torch.tensor([prompt.limit for prompt in prompts])
        heat = torch.tensor([prompt.temperature for prompt in prompts])[:, None]
        tokens = torch.tensor([[0] * (width - len(prompt.ids)) + prompt.ids for prompt in prompts])
        real = torch.arange(width) >= torch.tensor([[width - len(prompt.ids)] for prompt in prompts])
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        # A padding position sees itself, so that no row of the scores is empty.
        keep = ((real[:, None, :] & causal) | torch.eye(width, dtype=torch.bool))[:, None]
        size = (2, shape.num_hidden_layers, rows, shape.num_key_value_heads, width + int(limits.max()), shape.head_dim)
        cache = torch.empty(size)
        alive, at, step = torch.arange(rows), 0, 0
        out: list[list[int]] = [[] for _ in prompts]
        while True:
            x, end = self._network.embedding(tokens), at + tokens.shape[1]
            turn = self._network.cos[at:end], self._network.sin[at:end]
            for layer, block in enumerate(self._network.layers()):
                x = attend(block, x, turn, keep, cache[:, layer], at)
            logits = self._network.logits(norm(x[:, -1], self._network.final_norm, shape.rms_norm_eps))
            draws = -torch.log(torch.empty_like(logits).exponential_(generator=noise))
            chosen, step = (logits + heat * draws).argmax(-1), step + 1
            for row, token in zip(alive.tolist(), chosen.tolist(), strict=True):
                out[row].append(token)
            going = ~(torch.isin(chosen, self._ends) | (limits <= step))
            if not bool(going.any()):
                return out
            if not bool(going.all()):
                left = going.nonzero().squeeze(1)
                cache, real = cache[:, :, left], real[left]
                alive, chosen, limits, heat = alive[left], chosen[left], limits[left], heat[left]
            at, tokens = end, chosen[:, None]
            real = F.pad(real, (0, 1), value=True)
            keep = real[:, None, None, :]


def attend(block: Block, x: Tensor, turn: tuple[Tensor, Tensor], keep: Tensor, cache: Tensor, at: int) -> Tensor:
    """One layer over new positions [rows, new, size]; their keys and values go into the cache from ``at`` on.

    ``cache`` is [2, rows, key/value heads, capacity, head size], ``keep`` [rows, 1, new, positions so far].
    """
    s = block.shape
    rows, new, _ = x.shape
    groups, end = s.num_attention_heads // s.num_key_value_heads, at + new
    qkv = block.qkv(norm(x, block.input_norm, s.rms_norm_eps)).view(rows, new, -1, s.head_dim).transpose(1, 2)
    turned = s.num_attention_heads + s.num_key_value_heads
    left, right = qkv[:, :turned].chunk(2, dim=-1)
    cos, sin = turn
    qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    cache[0, :, :, at:end], cache[1, :, :, at:end] = qk[:, s.num_attention_heads :], qkv[:, turned:]
    q = qk[:, : s.num_attention_heads].reshape(rows, s.num_key_value_heads, groups * new, s.head_dim)
    scores = torch.matmul(q * s.head_dim**-0.5, cache[0, :, :, :end].transpose(-1, -2))
    scores = scores.view(rows, s.num_key_value_heads, groups, new, end).masked_fill(~keep[:, :, None], float("-inf"))
    shares = torch.softmax(scores, -1).view(rows, s.num_key_value_heads, groups * new, end)
    mixed = torch.matmul(shares, cache[1, :, :, :end]).view(rows, s.num_attention_heads, new, s.head_dim)
    x = x + block.out(mixed.transpose(1, 2).reshape(rows, new, -1))
    gate, up = block.gate_up(norm(x, block.post_norm, s.rms_norm_eps)).chunk(2, dim=-1)
    out: Tensor = x + block.down(F.silu(gate) * up)
    return out


def prompts(tokenizer: Tokenizer, seed: str, stage: int) -> Iterator[Prompt]:
    """The endless stream of prompts of a seed and a stage: chats cut where the model speaks, texts cut anywhere."""
    rng = random.Random(seed)
    makers, shares = [make for make, *_ in MIXTURE], [both[stage] for _, *both in MIXTURE]
    while True:
        pieces = rng.choices(makers, shares)[0](rng)
        heat = rng.choice((0.7, 1.0)) if rng.random() < SAMPLED else 0.0
        starts = [at for at, piece in enumerate(pieces) if piece.text == f"{TURN_START}assistant\n"]
        if starts:
            ids = _ids(tokenizer, pieces[: rng.choice(starts) + 1])
            limit = ANSWER
        else:
            whole = _ids(tokenizer, pieces)
            ids, limit = whole[: rng.randint(1, max(1, min(len(whole) - 1, 64)))], CONTINUATION
        if len(ids) <= PROMPT:
            yield Prompt(ids, limit, heat)


def _ids(tokenizer: Tokenizer, pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in tokenizer.encode(piece.text).ids]


def shard(generator: Generator, tokenizer: Tokenizer, name: str, index: int) -> list[Text]:
    """One shard of texts; the seed's name and the shard's index decide all of it."""
    seed = f"{name} {index}"
    source = prompts(tokenizer, seed, int(index >= FIRST_SHARDS))
    noise = torch.Generator().manual_seed(random.Random(seed).getrandbits(62))
    todo = sorted((next(source) for _ in range(POOL)), key=lambda prompt: (prompt.limit, len(prompt.ids)))
    out: list[Text] = []
    for at in tqdm(range(0, POOL, GROUP), seed, leave=False, mininterval=10.0):
        group = todo[at : at + GROUP]
        for prompt, said in zip(group, generator.write(group, noise), strict=True):
            out.append(Text(prompt.ids + said, len(prompt.ids)))
    random.Random(f"{seed} order").shuffle(out)
    return out


def save(texts: list[Text], path: Path) -> None:
    """Write a shard: all ids in one row, the lengths of the texts and where the answers begin."""
    fresh = path.with_suffix(".new")
    flat = [token for text in texts for token in text.ids]
    tensors = {
        "ids": torch.tensor(flat, dtype=torch.int16),
        "lengths": torch.tensor([len(text.ids) for text in texts], dtype=torch.int32),
        "starts": torch.tensor([text.start for text in texts], dtype=torch.int32),
    }
    save_file(tensors, fresh)
    fresh.replace(path)


def read(path: Path) -> list[Text]:
    """The texts of a shard."""
    tensors = load_file(path)
    parts = torch.split(tensors["ids"], tensors["lengths"].tolist())
    return [Text(part.tolist(), start) for part, start in zip(parts, tensors["starts"].tolist(), strict=True)]


def main() -> None:
    """Write the shards that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=Path("drafter-outputs"))
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="begin here; from 4 on shards lean on short answers")
    parser.add_argument("--seed", default="drafting")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    network, tokenizer = load(WEIGHTS)
    generator = Generator(network, tokenizer)
    options.folder.mkdir(parents=True, exist_ok=True)
    for index in range(options.first, options.shards):
        path = options.folder / f"{index:03}.safetensors"
        if not path.exists():
            texts = shard(generator, tokenizer, options.seed, index)
            save(texts, path)
            said = sum(len(text.ids) - text.start for text in texts)
            tqdm.write(f"{path.name}: {len(texts)} texts, {sum(len(text.ids) for text in texts)} tokens, {said} own")


if __name__ == "__main__":
    main()
