"""Decoding steps in one compiled call give what the model's parts give one by one, to the bit."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.batch.row_table import PlanError, RowTable
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.layers.aux_hidden_states import NO_AUX_HIDDEN_STATES, AuxHiddenStates
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.models.proposers.base import ProposalBatch
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.models.runner.runner import CompiledDecode, ModelRunner
from troupellm.models.speculation.draft_length import DraftLength
from troupellm.models.speculation.speculator import Options, Speculator
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.protocol.messages.worker import NewRow, RowChange, SamplingState, StepPlan, StepResult
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt
from troupellm.tests.support.speculation.scripted_drafts import ScriptedProposer

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")

BLOCK = 8
STATES = (
    SamplingState(temperature=0.0),
    SamplingState(temperature=1.0, seed=5),
    SamplingState(temperature=0.7, seed=6, min_p=0.05),
    SamplingState(temperature=1.3, seed=7, fork=2),
)


class Rows:
    """Rows that all decode, in blocks of their own in each group of the cache."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.calls = 0
        self.step = 0
        self.done: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        if runner.decode is not None:
            self._count(runner.decode)

    def _count(self, decode: CompiledDecode) -> None:
        plain = decode.run

        def counted(plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult | None:
            result = plain(plan, meanwhile)
            self.calls += result is not None
            return result

        decode.run = counted  # type: ignore[method-assign]

    def submit(self, row: int, prompt: list[int], state: SamplingState) -> NewRow:
        self.done[row], self.tokens[row] = 0, list(prompt)
        blocks = self._blocks(row, 0, len(prompt))
        ids = b"".join(token.to_bytes(4, "little") for token in prompt)
        return NewRow(
            row=row,
            epoch=1,
            request_id=str(row),
            token_ids=ids,
            num_prompt_tokens=len(prompt),
            sampling=state,
            blocks=blocks,
        )

    def _blocks(self, row: int, begin: int, end: int) -> tuple[tuple[int, ...], ...]:
        """New ones of each group for positions from `begin` on before `end`."""
        groups, width = self.runner.rows.num_groups, MAX_LEN // BLOCK
        held, needed = -(-begin // BLOCK), -(-end // BLOCK)
        firsts = [(row * groups + group) * width for group in range(groups)]
        return tuple(tuple(range(first + held, first + needed)) for first in firsts) if needed > held else ()

    def run(self, counts: dict[int, int], new: tuple[NewRow, ...] = (), limits: tuple[int, ...] = ()) -> StepResult:
        """Compute so many tokens of each row. limits: as of `StepPlan`."""
        grown = {row: self._blocks(row, done, done + counts[row]) for row, done in self.done.items() if row in counts}
        changes = [
            RowChange(row=row, appended_blocks=blocks) for row, blocks in grown.items() if blocks and self.done[row]
        ]
        plan = StepPlan(
            step=self.step,
            engine_epoch=0,
            rows=tuple(counts),
            epochs=(1,) * len(counts),
            new_rows=new,
            starts=tuple(self.done[row] for row in counts),
            counts=tuple(counts.values()),
            changes=tuple(changes),
            draft_limits=limits,
        )
        result = self.runner.run(plan)
        self.step += 1
        tokens = iter(result.tokens)
        for row, count in zip(counts, result.token_counts, strict=True):
            self.done[row] += counts[row]
            self.tokens[row] += [next(tokens) for _ in range(count)]
        return result


def read(pair: Pair, bits: str) -> Decoder:
    source = decoder_weights(pair.config, Checkpoint(pair.folder, torch.float32), EMBEDDING)
    return Decoder(pair.config, QuantizeOnLoad(source, "int8") if bits == "int8" else source, max_model_len=MAX_LEN)


def make_runner(decoder: Decoder, kind: torch.dtype, rows: int = 4, **more: Any) -> ModelRunner:
    groups = 2 * MAX_LEN // BLOCK  # of the most that a family here has
    cache = KVCache(decoder.config, rows * groups, BLOCK, kind)
    if kind == torch.float32:
        cache.storage.fill_(float("nan"))
    return ModelRunner(decoder, cache, max_model_len=MAX_LEN, **more)


def answers(decoder: Decoder, kind: torch.dtype, *, compiled: bool) -> tuple[dict[int, list[int]], int]:
    """Of rows that sample in different ways, come and go; and how many of the steps were one call."""
    runner = make_runner(decoder, kind)
    if not compiled:
        runner.decode = None
    rows = Rows(runner)
    lengths = {0: 3, 1: 1, 2: 45, 3: 18}
    new = tuple(rows.submit(row, make_prompt(length, seed=row), STATES[row]) for row, length in lengths.items())
    rows.run(lengths, new)
    for _ in range(25):
        rows.run(dict.fromkeys(range(4), 1))
    for _ in range(5):
        rows.run({3: 1, 1: 1})
    again = rows.submit(2, make_prompt(9, seed=9), STATES[1])
    again = NewRow(
        row=2,
        epoch=2,
        request_id="again",
        token_ids=again.token_ids,
        num_prompt_tokens=9,
        sampling=STATES[1],
        blocks=again.blocks,
    )
    runner.run(StepPlan(step=90, engine_epoch=0, rows=(), epochs=(), starts=(), counts=(), freed_rows=(2,)))
    plan = StepPlan(
        step=91, engine_epoch=0, rows=(0, 2), epochs=(1, 2), starts=(rows.done[0], 0), counts=(1, 9), new_rows=(again,)
    )
    for start in (9, 10):
        first = runner.run(plan)
        rows.tokens[0].append(first.tokens[0])
        rows.tokens[2].append(first.tokens[1])
        plan = StepPlan(
            step=83 + start,
            engine_epoch=0,
            rows=(0, 2),
            epochs=(1, 2),
            counts=(1, 1),
            starts=(rows.done[0] + start - 8, start),
        )
    return rows.tokens, rows.calls


@pytest.mark.parametrize(
    ("family", "bits"),
    [("llama_biases", "float32"), ("llama_biases", "int8"), ("mistral_window", "float32"), ("qwen3", "float32"),
     ("smollm3_window", "float32"), ("llama_one_kv_head", "int8")],
)  # fmt: skip
def test_one_call_chooses_what_many_choose(family: str, bits: str, tmp_path: Path) -> None:
    decoder = read(Pair(tmp_path, FAMILIES[family]()), bits)
    before = torch.get_num_threads()
    try:
        for kind in (torch.float32, torch.int8) if family == "llama_biases" else (torch.float32,):
            torch.set_num_threads(2)
            alone, none = answers(decoder, kind, compiled=False)
            found, calls = answers(decoder, kind, compiled=True)
            assert none == 0
            assert calls == 31
            assert found == alone
            torch.set_num_threads(1)
            assert answers(decoder, kind, compiled=True)[0] == alone
    finally:
        torch.set_num_threads(before)


class Speechless(ScriptedProposer):
    """Has no idea, ever."""

    def propose(self, batch: ProposalBatch) -> Drafts:
        return Drafts(np.zeros((batch.slots.size, 1), np.int32), np.zeros(batch.slots.size, np.int64))


class Dozing(Speechless):
    """Need not be shown every step."""

    def miss(self, slots: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """It reads nothing."""


@pytest.mark.parametrize(
    ("kind", "shown", "calls"),
    [
        (Speechless, NO_AUX_HIDDEN_STATES, 20),
        (Speechless, AuxHiddenStates(last=True), 0),
        (Dozing, AuxHiddenStates(last=True), 16),
    ],
    ids=["reads tokens", "reads every step", "reads four steps"],
)
def test_a_step_in_which_no_row_drafts_is_the_one_call_unless_the_proposer_is_shown_it(
    kind: type[Speechless], shown: AuxHiddenStates, calls: int, tmp_path: Path
) -> None:
    decoder = read(Pair(tmp_path, FAMILIES["llama_biases"]()), "float32")
    width = decoder.config.vocab_size
    proposer, ticks = kind({}, width, aux_hidden_states=shown), itertools.count(0.0)

    def speculation(rows: RowTable, options: Options, guides: GuidedRows | None) -> Speculator:
        length = DraftLength(range(1, 4), sleeps=True)
        return Speculator(proposer, rows, options, width, length=length, clock=lambda: next(ticks))

    found = []
    settings: tuple[dict[str, Any], ...] = ({}, {"speculation": speculation})
    for more in settings:
        rows = Rows(make_runner(decoder, torch.float32, **more))
        new = tuple(rows.submit(row, make_prompt(5, seed=row), STATES[row]) for row in (0, 1))
        rows.run({0: 5, 1: 5}, new)
        for _ in range(20):
            rows.run({0: 1, 1: 1}, limits=(3, 3) if more else ())
        assert rows.calls == (calls if more else 20)
        found.append(rows.tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["granite", "gemma2", "mixtral"])
def test_models_without_a_compiled_step_are_computed_part_by_part(family: str, tmp_path: Path) -> None:
    """Logits that are scaled or capped, norms behind a part, experts."""
    decoder = read(Pair(tmp_path, FAMILIES[family]()), "float32")
    assert make_runner(decoder, torch.float32).decode is None


def test_more_rows_than_slots_at_first(tmp_path: Path) -> None:
    """The tables move in memory when they grow, and again when they grow once more."""
    decoder = read(Pair(tmp_path, FAMILIES["llama_biases"]()), "float32")
    found = []
    for compiled in (False, True):
        runner = make_runner(decoder, torch.float32, rows=40)
        if not compiled:
            runner.decode = None
        rows = Rows(runner)
        for many in (3, 17, 40):
            fresh = range(len(rows.done), many)
            new = tuple(rows.submit(row, make_prompt(4 + row % 5, seed=row), STATES[row % 4]) for row in fresh)
            rows.run({row: len(rows.tokens[row]) for row in fresh}, new)
            for _ in range(3):
                rows.run(dict.fromkeys(range(many), 1))
        assert rows.calls == (9 if compiled else 0)
        found.append(rows.tokens)
    assert found[0] == found[1]


def test_what_asks_for_more_is_computed_part_by_part(tmp_path: Path) -> None:
    decoder = read(Pair(tmp_path, FAMILIES["llama_biases"]()), "float32")
    rows = Rows(make_runner(decoder, torch.float32))
    states = (SamplingState(temperature=0.0), SamplingState(temperature=1.0, top_k=3), SamplingState(logprobs=2))
    new = tuple(rows.submit(row, make_prompt(5, seed=row), state) for row, state in enumerate(states))
    rows.run({0: 5, 1: 5, 2: 3}, new)
    rows.run({0: 1, 1: 1})
    assert rows.run({0: 1, 2: 1}).token_counts == (1, 0), "a chunk of one token, behind which nothing is sampled"
    rows.run({2: 1})
    assert len(rows.run({0: 1, 2: 1}).logprobs) == 1
    assert rows.calls == 0
    rows.run({0: 1})
    assert rows.calls == 1


def test_plans_that_contradict_what_is_known_are_refused(tmp_path: Path) -> None:
    decoder = read(Pair(tmp_path, FAMILIES["llama_biases"]()), "float32")
    rows = Rows(make_runner(decoder, torch.float32))
    rows.run({0: 8}, (rows.submit(0, make_prompt(8), STATES[0]),))
    rows.run({0: 1})
    state = rows.runner.rows.tokens.clone(), rows.runner.rows.lengths.copy()

    def refused(reason: str, start: int, epoch: int = 1, row: int = 0, blocks: tuple[int, ...] = ()) -> None:
        changes = (RowChange(row=0, appended_blocks=(blocks,)),) if blocks else ()
        plan = StepPlan(
            step=9, engine_epoch=0, rows=(row,), epochs=(epoch,), starts=(start,), counts=(1,), changes=changes
        )
        with pytest.raises(PlanError, match=reason):
            rows.runner.run(plan)
        assert torch.equal(rows.runner.rows.tokens, state[0])
        assert (rows.runner.rows.lengths == state[1]).all()

    refused("row 3 is not known", 9, row=3)
    refused("row 0: wrong epoch", 9, epoch=2)
    refused("row 0: wrong span beyond its tokens", 10)
    for _ in range(7):
        rows.run({0: 1})
    state = rows.runner.rows.tokens.clone(), rows.runner.rows.lengths.copy()
    refused("row 0: wrong span beyond its blocks", 16)
    refused("block 100000 of", 16, blocks=(100000,))


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    rows = Rows(make_runner(read(Pair(tmp_path, FAMILIES["llama_biases"]()), "float32"), torch.float32))
    with pytest.raises(IndexError, match="out of range"):
        rows.run({0: 1}, (rows.submit(0, [100000], STATES[0]),))


def test_a_row_without_a_token_fails_alone(tmp_path: Path) -> None:
    decoder = read(Pair(tmp_path, FAMILIES["llama_biases"]()), "float32")
    found = []
    for compiled in (False, True):
        runner = make_runner(decoder, torch.float32)
        if not compiled:
            runner.decode = None
        rows = Rows(runner)
        rows.run({0: 8, 1: 8}, tuple(rows.submit(row, make_prompt(8, seed=row), STATES[row]) for row in (0, 1)))
        block = int(runner.rows.blocks[0, runner.rows.slot(0), 0])
        runner.cache.layers[0][1][block] = torch.nan
        for _ in range(2):
            result = rows.run({0: 1, 1: 1})
            assert [error.row for error in result.errors] == [0]
            assert result.token_counts == (0, 1)
        assert rows.calls == 2 * compiled
        found.append(rows.tokens)
    assert found[0] == found[1]
