"""The drafters that are shipped with the built-in model: what they hold, and how often they are right."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.models.proposers.checkpoint_folder import SHIPPED_METHODS, drafter_folder
from troupellm.protocol.config.engine import ModelConfig
from troupellm.training import evaluate
from troupellm.training.batches import token_id
from troupellm.training.documents import END_OF_TEXT
from troupellm.training.drafters_evaluate import (
    all_kinds,
    answers,
    load_drafters,
    measure,
    prompts,
    right,
    walk,
)
from troupellm.training.drafters_network import HEADS, SMALL, Eagle, Medusa
from troupellm.training.drafters_tally import Tally
from troupellm.training.drafters_texts import Generator, Text
from troupellm.training.network import Network

MOST_BYTES = 4_000_000
DEPTH = 4


def _folder(method: str) -> Path:
    return drafter_folder(method, "builtin", ModelConfig(), lambda _progress: None)


def _shapes(method: str) -> dict[str, tuple[int, ...]]:
    with safe_open(_folder(method) / "model.safetensors", "pt") as opened:
        found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        assert {part.get_dtype() for part in found.values()} == {"F16"}
        return {name: tuple(part.get_shape()) for name, part in found.items()}


@pytest.fixture(scope="module")
def target() -> Network:
    return evaluate.load(BUILTIN_FOLDER)[0]


@pytest.fixture(scope="module")
def texts(target: Network) -> dict[str, list[Text]]:
    tokenizer = evaluate.load(BUILTIN_FOLDER)[1]
    generator = Generator(target, tokenizer)
    asked = prompts(3)
    del asked["stories"]  # long, and the easiest of all
    return {kind: answers(generator, tokenizer, group) for kind, group in asked.items()}


def test_together_they_are_small() -> None:
    files = [file for method in SHIPPED_METHODS for file in _folder(method).iterdir()]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


def test_the_draft_model_has_a_tenth_of_the_parameters_and_the_same_tokenizer() -> None:
    with safe_open(BUILTIN_FOLDER / "model.safetensors", "pt") as opened:
        whole = sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118 - not a mapping
    small = sum(torch.Size(shape).numel() for shape in _shapes("draft_model").values())
    assert small <= whole / 10
    assert (_folder("draft_model") / "tokenizer.json").read_bytes() == (BUILTIN_FOLDER / "tokenizer.json").read_bytes()


def test_the_eagle_head_has_the_public_layout() -> None:
    shapes, config = _shapes("eagle"), json.loads((_folder("eagle") / "config.json").read_text())
    attention = {"q_proj": (256, 256), "k_proj": (128, 256), "v_proj": (128, 256), "o_proj": (256, 256)}
    feed = {"gate_proj": (640, 256), "up_proj": (640, 256), "down_proj": (256, 640)}
    assert shapes == {
        "fc.weight": (256, 512),
        **{f"layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()},
        **{f"layers.0.mlp.{name}.weight": shape for name, shape in feed.items()},
        "layers.0.post_attention_layernorm.weight": (256,),
    }
    assert (config["model_type"], config["num_hidden_layers"], config["bias"]) == ("llama", 1, False)


def test_the_medusa_heads_have_the_public_layout() -> None:
    shapes, config = _shapes("medusa"), json.loads((_folder("medusa") / "config.json").read_text())
    heads, blocks = config["medusa_num_heads"], config["medusa_num_layers"]
    named = [f"{head}.{block}.linear" for head in range(heads) for block in range(blocks)]
    assert shapes == {f"{at}.weight": (256, 256) for at in named} | {f"{at}.bias": (256,) for at in named}


def test_drafts_are_about_as_often_right_as_the_card_says(target: Network, texts: dict[str, list[Text]]) -> None:
    drafters = load_drafters(target)
    pad = token_id(evaluate.load(BUILTIN_FOLDER)[1], END_OF_TEXT)
    rows = [{name: measure(target, one, said, DEPTH, pad) for name, one in drafters.items()} for said in texts.values()]
    lengths = {name: tally.length for name, tally in all_kinds(rows).items()}
    assert lengths["eagle"] >= 3.5
    assert lengths["medusa"] >= 2.3
    assert lengths["draft_model"] >= 2.2


def test_a_random_head_is_hardly_ever_right(target: Network, texts: dict[str, list[Text]]) -> None:
    torch.manual_seed(1)
    random = Medusa(target)
    assert measure(target, random, texts["facts"], HEADS, 0).length < 1.5


def test_the_chain_is_what_drafting_step_by_step_gives(target: Network, texts: dict[str, list[Text]]) -> None:
    """Drafts made one after another, from the head's own features, agree with all chains computed at once."""
    head = load_drafters(target)["eagle"]
    assert isinstance(head, Eagle)
    text = texts["JSON"][0]
    tokens = torch.tensor([text.ids])
    hits = right(target, head, tokens, DEPTH)[0]
    with torch.no_grad():
        true = target(tokens)
        for newest in range(text.start, min(text.start + 6, len(text.ids) - 1)):
            drafts = _draft(target, head, tokens[:, : newest + 1], true[:, :newest])
            wanted = text.ids[newest + 1 : newest + 1 + DEPTH]
            kept = [draft == token for draft, token in zip(drafts, wanted, strict=False)]
            seen = [bool(hits[link, newest + 1 + link]) for link in range(len(kept))]
            # Behind the first draft that is wrong the two read different tokens.
            end = kept.index(False) + 1 if False in kept else len(kept)
            assert kept[:end] == seen[:end]


def _draft(target: Network, head: Eagle, tokens: Tensor, features: Tensor) -> list[int]:
    drafts: list[int] = []
    for _ in range(DEPTH):
        features = torch.cat((features, head.chain(target.embedding(tokens[:, 1:]), features, 1)[0][:, -1:]), dim=1)
        drafts.append(int(target.logits(features[:, -1]).argmax()))
        tokens = torch.cat((tokens, torch.tensor([[drafts[-1]]])), dim=1)
    return drafts


def test_walking_counts_accepted_drafts_and_ends_with_the_answer() -> None:
    text = Text(ids=list(range(10)), start=3)
    everything = torch.ones((DEPTH, 10), dtype=torch.bool)
    # Token 3 is the prompt's; 4 .. 7 are drafts and 8 the model's own; then one draft is left to accept.
    assert walk(everything, text, DEPTH) == Tally(verified=2, accepted=5)
    nothing = torch.zeros((DEPTH, 10), dtype=torch.bool)
    assert walk(nothing, text, DEPTH) == Tally(verified=6, accepted=0)
    first = nothing.clone()
    first[0, 5] = True  # the first draft of a verification that has token 4 as its newest
    assert walk(first, text, DEPTH) == Tally(verified=5, accepted=1)


def test_the_small_shape_is_what_is_shipped() -> None:
    config = json.loads((_folder("draft_model") / "config.json").read_text())
    assert {name: config[name] for name in SMALL.__slots__} == {name: getattr(SMALL, name) for name in SMALL.__slots__}
