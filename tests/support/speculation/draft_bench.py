"""A model and its drafter, step by step: what a worker does for them, and nothing else of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from troupellm.kernels.sampling.noise import stream_key
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.cache_layout import with_cache_groups
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.models.load.architecture import describe_model
from troupellm.models.memory.drafter_needs import Target
from troupellm.models.proposers.base import Observation, ProposalBatch, Proposer, RowDraws, Sleeper
from troupellm.models.proposers.paged_attention import Paging, positions_of
from troupellm.models.proposers.registry import MODULES
from troupellm.models.speculation.requirements import drafter_needs, settle
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.worker import NewRow, SamplingState

BLOCK, LONGEST = 4, 160


@dataclass(frozen=True)
class Context:
    """As `registry.ProposerContext`."""

    decoder: Decoder
    cache: KVCache
    folder: Path
    model: ModelConfig
    dtype: torch.dtype = torch.float32
    max_model_len: int = LONGEST
    max_num_seqs: int = 8


@dataclass
class Row:
    tokens: list[int]
    blocks: list[int]
    computed: int
    """Positions that have keys and values."""
    slot: int
    expected: list[list[int]] = field(default_factory=list)


def read_target(folder: Path) -> Decoder:
    config = with_cache_groups(describe_model(folder), LONGEST, hybrid=True)
    checkpoint = Checkpoint(folder, torch.float32)
    decoder = Decoder(config, decoder_weights(config, checkpoint, EMBEDDING), max_model_len=LONGEST)
    checkpoint.finish()
    return decoder


class DraftBench:
    """Rows of one target, greedy, with drafts of one proposer; the caller that adds a row gives its block tables."""

    def __init__(self, folder: Path, config: SpeculativeConfig, *, num_blocks: int = 200) -> None:
        self.decoder, self.model = read_target(folder), ModelConfig(model=str(folder))
        settled = settle(config, self.model, lambda _: None)
        target = Target(
            folder=folder,
            model=self.model,
            config=self.decoder.config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=LONGEST,
        )
        self.needs = drafter_needs(settled, target)
        self.cache = KVCache(
            self.decoder.config, num_blocks, BLOCK, torch.float32, drafter=self.needs.layers, border=self.needs.border
        )
        for storage in self.cache.storages[:2]:
            storage.fill_(float("nan"))  # unwritten entries may not be read
        made = import_module(MODULES[settled.method])
        self.proposer: Proposer = made.make(settled, Context(self.decoder, self.cache, folder, self.model))
        self.paging = Paging(self.decoder.config, self.cache, torch.float32, batch_invariant=False)
        self.tokens = torch.full((8, LONGEST + 1), -7, dtype=torch.int32)
        self.blocks: NDArray[np.int32] = np.full((1, 8, -(-LONGEST // BLOCK)), -1, dtype=np.int32)
        self.rows: list[Row] = []

    def add(self, slot: int, tokens: Sequence[int], blocks: Sequence[int], computed: int = 0) -> Row:
        row = Row(list(tokens), list(blocks), computed, slot)
        self.tokens[slot, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int32)
        self.blocks[0, slot, : len(blocks)] = blocks
        new = NewRow(
            row=slot,
            epoch=0,
            request_id="",
            token_ids=np.array(tokens, dtype="<i4").tobytes(),
            num_prompt_tokens=len(tokens),
            sampling=SamplingState(temperature=0.0),
            blocks=(tuple(blocks),),
        )
        self.proposer.add_row(slot, new)
        self.rows.append(row)
        return row

    def drop(self, row: Row) -> None:
        self.proposer.drop_row(row.slot, self.tokens[row.slot, : len(row.tokens)].numpy())
        self.tokens[row.slot] = -7
        self.rows.remove(row)

    def propose(self, rows: Sequence[Row], limits: Sequence[int], temperature: float = 0.0, seed: int = 0) -> Drafts:
        """Drafts of rows that have one token left to compute."""
        return self.proposer.propose(
            ProposalBatch(
                slots=np.array([row.slot for row in rows], dtype=np.int64),
                lengths=np.array([len(row.tokens) for row in rows], dtype=np.int64),
                limits=np.array(limits, dtype=np.int64),
                tokens=self.tokens,
                blocks=self.blocks,
                draws=RowDraws(
                    torch.tensor([stream_key(seed, row.slot) for row in rows]),
                    torch.full((len(rows),), 0.0 if temperature == 0 else 1 / temperature),
                ),
            )
        )

    @torch.inference_mode()
    def step(
        self, most: int, chunk: int, check: Callable[[Row, list[int]], None] | None = None, *, shown: bool = True
    ) -> list[int]:
        """One step of all rows: a chunk of what a row has to compute, or its last token and `most` drafts.

        Args:
            check: told of every row's drafts, before they are judged.
            shown: to the proposer; else it is told that it is not.

        Returns:
            how many drafts were kept, of each row that drafted.
        """
        writing = [row for row in self.rows if row.computed == len(row.tokens) - 1]
        drafted: dict[int, list[int]] = {}
        if writing and most:
            found = self.propose(writing, [most] * len(writing))
            assert found.parents is None
            for index, row in enumerate(writing):
                drafted[row.slot] = found.token_ids[index, : int(found.counts[index])].tolist()
                if check is not None:
                    check(row, drafted[row.slot])
        parts = [(row.tokens + drafted.get(row.slot, []))[row.computed :][:chunk] for row in self.rows]
        hidden, aux = self._forward(parts)
        ends = np.cumsum([len(part) for part in parts])
        starts, counts, kept, pieces = [], [], [], []
        for row, part, end in zip(list(self.rows), parts, ends.tolist(), strict=True):
            here = slice(end - len(part), end)
            starts.append(row.computed)
            whole = row.computed + len(part) >= len(row.tokens)
            accepted = 0
            if whole:
                guesses = drafted.get(row.slot, [])
                drawn = self.decoder.logits(hidden[here][-1 - len(guesses) :]).argmax(-1).tolist()
                while accepted < len(guesses) and guesses[accepted] == drawn[accepted]:
                    accepted += 1
                if row in writing:
                    kept.append(accepted)
                part = part[: len(part) - len(guesses) + accepted]
                row.tokens += [*guesses[:accepted], drawn[accepted]]
                self.tokens[row.slot, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
            pieces.append(aux[here][: len(part)])
            counts.append(len(part))
            row.computed += len(part)
        slots = np.array([row.slot for row in self.rows], dtype=np.int64)
        if not shown:
            assert isinstance(self.proposer, Sleeper)
            self.proposer.miss(slots, np.array(starts))
            return kept
        self.proposer.observe(
            Observation(slots, np.array(starts), np.array(counts), torch.cat(pieces), self.tokens, self.blocks)
        )
        return kept

    def _forward(self, parts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        slots = np.array([row.slot for row in self.rows], dtype=np.int64)
        starts = np.array([row.computed for row in self.rows], dtype=np.int64)
        counts = np.array([len(part) for part in parts], dtype=np.int64)
        ids = torch.tensor([token for part in parts for token in part])
        batch = self.paging.batch(self.blocks, slots, starts, counts, ids, positions_of(starts, counts))
        batch = replace(batch, logit_tokens=torch.arange(ids.numel()))
        return self.decoder.forward_with_aux(batch, self.cache.layers, self.proposer.aux_hidden_states)

    def aux(self, tokens: Sequence[int], aux_hidden_states: AuxHiddenStates | None = None) -> torch.Tensor:
        """The features that the proposer (or `aux_hidden_states`) reads of the model, of a text computed separately,
        [tokens, ...]."""
        cache = KVCache(self.decoder.config, LONGEST, BLOCK, torch.float32)
        paging = Paging(self.decoder.config, cache, torch.float32, batch_invariant=False)
        starts, counts = np.zeros(1, dtype=np.int64), np.array([len(tokens)])
        table = np.arange(LONGEST, dtype=np.int32)[None, None]
        positions = positions_of(starts, counts)
        batch = paging.batch(table, starts, starts, counts, torch.tensor(list(tokens)), positions)
        return self.decoder.forward_with_aux(batch, cache.layers, aux_hidden_states or self.proposer.aux_hidden_states)[
            1
        ]


def crowd(bench: DraftBench, check: Callable[[Row, list[int]], None], most: int, steps: int = 10) -> list[int]:
    """Chunked prompts, a prefix hit, a preemption and a row that comes late, with a check of every draft.

    Returns:
        kept drafts per proposal.
    """
    text = np.random.default_rng(3).integers(0, 250, 100).tolist()
    kept: list[int] = []
    first = bench.add(0, text[:5], range(40))
    second = bench.add(3, text[10:33], range(40, 80))
    for _ in range(steps):
        kept += bench.step(most, 6, check)
    # The first 16 tokens are there; what follows differs.
    third = bench.add(1, text[10:28] + text[50:57], [40, 41, 42, 43, *range(80, 116)], computed=16)
    for _ in range(steps):
        kept += bench.step(most, 6, check)
    bench.drop(second)
    again = bench.add(3, second.tokens, range(120, 160))
    for _ in range(steps):
        kept += bench.step(most, 6, check)
    assert {len(row.tokens) > 20 for row in (first, again, third)} == {True}
    return kept


def behind_a_block(bench: DraftBench, check: Callable[[Row, list[int]], None]) -> None:
    """Rows that share all of their first blocks, differ right behind them, and draft only now and then."""
    text = np.random.default_rng(4).integers(0, 250, 40).tolist()
    for row in list(bench.rows):
        bench.drop(row)
    for number in range(3):
        prompt, blocks = text[:8] + text[10 + number :][:6], [0, 1, *range(10 + 40 * number, 48 + 40 * number)]
        row = bench.add(number, prompt, blocks, computed=8 if number else 0)
        for silent in (0, 2, 9, 27):
            for _ in range(silent):
                bench.step(0, 6)
            for _ in range(3):
                bench.step(3, 6, check)
        bench.drop(row)
