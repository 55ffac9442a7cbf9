"""Models of eight tokens, real ones with layers and random weights, and who drafts for them; and what the models say
behind every short text, computed separately."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from troupellm.tests.support.checkpoints import deepseek_mtp
from troupellm.tests.support.checkpoints.tiny_model import LAYERS, write_tiny_model
from troupellm.tests.support.speculation.plain_heads import (
    CONFIG,
    CONFIG3,
    SIZE,
    WIDE,
    attended,
    fed_forward,
    layer_shapes,
    medusa_weights,
    normed,
    random_weights,
    write_head,
)

VOCAB = 8
PROMPT = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 6, 1, 4)
"""Not of all tokens, so that penalties tell them apart; and a block of sixteen ends among what follows."""
TOKENS = 4
"""That are drawn behind it."""
DRAFTED = (0, 1, 3, 4, 5, 7)
"""The tokens of the EAGLE-3 head."""
HEAD_DIM = 16
"""The least that compiled attention takes."""
FLATTER = 0.5
"""Of logits: at temperature 1 each token is then drawn often enough."""


@dataclass(frozen=True)
class Toy:
    """A model, and its drafters beside it."""

    folder: Path
    tables: tuple[NDArray[np.float64], ...]
    """By length, logits [texts, VOCAB] behind the prompt and every text of up to TOKENS - 1 tokens; the texts count up,
    their last token the fastest."""


def histories(length: int) -> NDArray[np.int64]:
    """The prompt and every text of a length behind it [texts, tokens], in the order of `Toy.tables`."""
    ends = np.array(list(product(range(VOCAB), repeat=length)), dtype=np.int64)
    return np.concatenate((np.tile(np.array(PROMPT), (len(ends), 1)), ends), axis=1)


def toy_llama(home: Path) -> Toy:
    """With the folders small, eagle, eagle3 and medusa beside it."""
    own: dict[str, object] = {"vocab_size": VOCAB, "head_dim": HEAD_DIM}
    weights = _write_llama(home / "target", seed=0)
    _write_llama(home / "small", seed=1)
    shapes = {"fc.weight": (SIZE, 2 * SIZE), **layer_shapes("layers.0", SIZE, WIDE, SIZE, HEAD_DIM)}
    write_head(home / "eagle", random_weights(shapes, seed=4), CONFIG | own)
    write_head(home / "eagle3", _eagle3(), CONFIG3 | own | {"draft_vocab_size": len(DRAFTED)})
    heads: dict[str, object] = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    write_head(home / "medusa", medusa_weights(3, 1, outputs=False), heads)
    return Toy(home / "target", _tables(lambda texts: torch.stack([_llama(weights, text) for text in texts])))


def toy_deepseek(home: Path) -> Toy:
    """With a layer of its own for further tokens."""
    folder, reference, _ = deepseek_mtp.write_deepseek(home / "deepseek")
    weights, before = load_file(folder / "model.safetensors"), deepseek_mtp.SETTINGS["vocab_size"]
    for name, weight in weights.items():
        if weight.ndim == 2 and weight.shape[0] == before:
            weights[name] = weight[:VOCAB] * (1.0 if "embed" in name else FLATTER)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _configure(folder, vocab_size=VOCAB)
    reference.model.layers = reference.model.layers[: deepseek_mtp.LAYERS]

    def logits(texts: Tensor) -> Tensor:
        found: Tensor = reference(texts, use_cache=False).logits[..., :VOCAB] * FLATTER
        return found

    return Toy(folder, _tables(logits))


@torch.inference_mode()
def _tables(logits: Callable[[Tensor], Tensor]) -> tuple[NDArray[np.float64], ...]:
    """logits: [texts, tokens, VOCAB] of texts [texts, tokens]. The longest ones tell of all shorter ones, too."""
    found = logits(torch.from_numpy(histories(TOKENS - 1))).double().numpy()
    first = len(PROMPT) - 1
    return tuple(found[:: VOCAB ** (TOKENS - 1 - length), first + length].copy() for length in range(TOKENS))


def _write_llama(folder: Path, *, seed: int) -> dict[str, Tensor]:
    """Its weights."""
    write_tiny_model(folder)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, SIZE), "model.norm.weight": (SIZE,), "lm_head.weight": (VOCAB, SIZE),
    }  # fmt: skip
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            **layer_shapes(prefix, SIZE, WIDE, SIZE, HEAD_DIM),
            f"{prefix}.input_layernorm.weight": (SIZE,),
        }
    weights = random_weights(shapes, seed=seed)
    weights["lm_head.weight"] *= FLATTER
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _configure(folder, vocab_size=VOCAB, head_dim=HEAD_DIM)
    return weights


def _llama(weights: dict[str, Tensor], text: Tensor) -> Tensor:
    """Logits [tokens, VOCAB] in plain torch."""
    x = weights["model.embed_tokens.weight"][text]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        x = x + attended(normed(x, weights[f"{prefix}.input_layernorm.weight"]), weights, prefix, None)
        x = x + fed_forward(normed(x, weights[f"{prefix}.post_attention_layernorm.weight"]), weights, prefix)
    return normed(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _eagle3() -> dict[str, Tensor]:
    shapes = {
        "fc.weight": (SIZE, 3 * SIZE),
        "midlayer.hidden_norm.weight": (SIZE,),
        "midlayer.input_layernorm.weight": (SIZE,),
        "norm.weight": (SIZE,),
        "lm_head.weight": (len(DRAFTED), SIZE),
        **layer_shapes("midlayer", SIZE, WIDE, 2 * SIZE, HEAD_DIM),
    }
    chosen, inside = torch.tensor(DRAFTED), torch.zeros(VOCAB, dtype=torch.bool)
    inside[chosen] = True
    return random_weights(shapes, seed=5) | {"d2t": chosen - torch.arange(len(DRAFTED)), "t2d": inside}


def _configure(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
