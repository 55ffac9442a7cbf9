"""The texts and rows from which the drafters of the built-in model learn."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from troupellm.training import evaluate
from troupellm.training.decode import greedy
from troupellm.training.drafters_data import LENGTH, Lessons, pack, pupils
from troupellm.training.drafters_network import Medusa
from troupellm.training.drafters_texts import Generator, Prompt, Text, prompts, read, save
from troupellm.training.drafters_train import DRAFTERS, Pupil, Trainer
from troupellm.training.network import Network


@pytest.fixture(scope="module")
def model() -> tuple[Network, Tokenizer]:
    return evaluate.load(evaluate.WEIGHTS)


def test_answers_in_a_group_are_those_of_the_reference(model: tuple[Network, Tokenizer]) -> None:
    network, tokenizer = model
    asked = [case.prompt for task in evaluate.cases(2).values() for case in task][:12]
    group = [Prompt(tokenizer.encode(text).ids, 24) for text in asked]
    said = Generator(network, tokenizer).write(group, torch.Generator().manual_seed(0))
    marks = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
    plain = [tokenizer.decode([t for t in ids if t not in marks], skip_special_tokens=False) for ids in said]
    assert plain == greedy(network, tokenizer, asked, 24)


def test_a_sampled_text_follows_the_seed(model: tuple[Network, Tokenizer]) -> None:
    network, tokenizer = model
    ids = tokenizer.encode("<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n").ids
    group = [Prompt(ids, 16, 8.0), Prompt(ids, 16)]
    generator = Generator(network, tokenizer)
    first, again, other = (generator.write(group, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != other[0]
    assert first[1] == other[1]


@pytest.mark.parametrize("stage", [0, 1])
def test_prompts_follow_the_seed_and_fit(model: tuple[Network, Tokenizer], stage: int) -> None:
    source, again = prompts(model[1], "a", stage), prompts(model[1], "a", stage)
    drawn = [next(source) for _ in range(40)]
    assert drawn == [next(again) for _ in range(40)]
    assert all(0 < len(prompt.ids) <= 448 for prompt in drawn)
    assert {prompt.limit for prompt in drawn} <= {128, 320}


def test_a_shard_survives_its_file(tmp_path: Path) -> None:
    texts = [Text([1, 2, 3], 1), Text([2047], 0), Text([5, 6], 2)]
    save(texts, tmp_path / "000.safetensors")
    assert read(tmp_path / "000.safetensors") == texts


def test_rows_hold_every_text_once_and_know_what_the_model_wrote() -> None:
    texts = [Text([7] * size, size // 2) for size in (500, 300, 200, 100, 12, LENGTH + 40)]
    rows = pack(texts, [8, 9], 9)
    assert all(len(row.ids) == len(row.own) <= LENGTH for row in rows)
    # The text that is too long loses its end, and what the model wrote there.
    assert sum(sum(row.own) for row in rows) == 250 + 150 + 100 + 50 + 6 + LENGTH - (LENGTH + 40) // 2
    assert sum(row.ids.count(9) for row in rows) == 5
    ended = pack([Text([7, 9], 1)], [8, 9], 9)
    assert (ended[0].ids, ended[0].own) == ([7, 9], [False, True])


@pytest.mark.slow
def test_every_drafter_learns_from_a_lesson(model: tuple[Network, Tokenizer], tmp_path: Path) -> None:
    network, tokenizer = model
    group = [next(source) for source in [prompts(tokenizer, "lesson", 1)] for _ in range(4)]
    said = Generator(network, tokenizer).write(group, torch.Generator().manual_seed(0))
    save([Text(p.ids + ids, len(p.ids)) for p, ids in zip(group, said, strict=True)], tmp_path / "000.safetensors")
    lesson = next(Lessons(network, tokenizer, tmp_path, 1).batches(1))
    torch.manual_seed(1)
    for name, module in pupils(network).items():
        pupil = Pupil(name, module, 1e-3)
        losses = [pupil.learn(network, lesson, 1.0) for _ in range(2)]
        assert losses[-1] < losses[0]
    options = Namespace(
        seed=1,
        outputs=tmp_path,
        rows=1,
        rate=1e-3,
        first_shard=0,
        only=["medusa", "draft_model"],
        state=tmp_path / "state.safetensors",
        source=None,
    )
    trainer = Trainer(options)
    for pupil in trainer.pupils:
        pupil.learn(trainer.target, lesson, 1.0)
    trainer.step = 3
    trainer.save()
    other = Trainer(options)
    other.restore()
    assert other.step == 3
    kept, restored = (dict(t for pupil in one.pupils for t in pupil.tensors()) for one in (trainer, other))
    assert kept.keys() == restored.keys()
    assert all(torch.equal(kept[name], restored[name]) for name in kept)


def test_drafters_go_on_from_those_of_a_folder(tmp_path: Path) -> None:
    options = Namespace(seed=1, outputs=tmp_path, rows=1, rate=1e-3, first_shard=0, only=["medusa"], source=DRAFTERS)
    (pupil,) = Trainer(options).pupils
    assert isinstance(pupil.module, Medusa)
    shipped, mine = load_file(DRAFTERS / "medusa" / "model.safetensors"), pupil.module.checkpoint()
    assert shipped.keys() == mine.keys()
    assert all(torch.equal(shipped[name], value.detach().half()) for name, value in mine.items())
