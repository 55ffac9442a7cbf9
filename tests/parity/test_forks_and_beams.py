"""Forks and beam search on the tiny torch model: against independent runs, a plain search, and transformers."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.output import StepOutput
from troupellm.protocol.messages.scheduler import BeamSettings, SequenceSpec, SubmitRequest
from troupellm.protocol.messages.worker import SamplingState, StepPlan, WorkerReady
from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH, write_tiny_model

PROMPT = [(7 * index * index + 3 * index) % 250 for index in range(37)]
EOS = frozenset(range(0, 60, 2))
"""A tenth of the vocabulary, so that searches meet them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder)


class Machine:
    """Scheduler and torch worker, step by step."""

    def __init__(self, folder: Path, *, blocks: int = 200, caching: bool = True, plans: int = 1, budget: int = 64):
        config = EngineConfig.from_flat(
            {
                "num_gpu_blocks_override": blocks,
                "block_size": 4,
                "max_model_len": 56,
                "device": "cpu",
                "max_plans_in_flight": plans,
                "max_num_batched_tokens": budget,
            }
        )
        self.worker = ModelWorker(folder)
        self.ready: WorkerReady = self.worker.load(config, lambda _: None)
        self.core = SchedulerCore(config.scheduler, self.ready, enable_prefix_caching=caching, hash_key=b"k")
        self.plans: list[StepPlan] = []
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, float] = {}
        self.most_blocks = 0

    def submit(self, request: int, states: list[SamplingState], **fields: object) -> None:
        defaults = {"max_tokens": 12, "eos_token_ids": frozenset()}
        self.core.submit(
            SubmitRequest(
                request=request,
                request_id=str(request),
                arrival=0.0,
                prompt=np.array(fields.pop("prompt", PROMPT), dtype="<i4").tobytes(),
                sequences=tuple(SequenceSpec(row=100 * request + i, sampling=s) for i, s in enumerate(states)),
                min_tokens=0,
                stop_token_ids=frozenset(),
                **(defaults | fields),
            )
        )

    def run(self) -> dict[int, list[int]]:
        flying = []
        for now in itertools.count():
            while (plan := self.core.plan(float(now))) is not None:
                self.plans.append(plan)
                flying.append(self.worker.launch(plan))
            self.most_blocks = max(self.most_blocks, self.core.snapshot().blocks_used)
            if not flying:
                break
            self.read(self.core.update(self.worker.collect(flying.pop(0)), float(now)))
            self.core.assert_invariants()
        self.read(self.core.take_output())
        assert self.core.snapshot().blocks_used == 0
        return self.tokens

    def read(self, output: StepOutput | None) -> None:
        if output is None:
            return
        assert all(closed.error is None for closed in output.closed)
        tokens = iter(output.tokens)
        for row, count in zip(output.rows, output.token_counts, strict=True):
            self.tokens.setdefault(row, []).extend(itertools.islice(tokens, count))
        for entry in output.logprobs:
            columns = np.frombuffer(entry.logprobs, "<f4").reshape(-1, entry.width)
            self.logprobs[entry.row] = self.logprobs.get(entry.row, 0.0) + float(columns[:, 0].sum())


def forks(count: int) -> list[SamplingState]:
    return [SamplingState(seed=11, fork=fork, temperature=0.8) for fork in range(count)]


@pytest.fixture(scope="module")
def independent(folder: Path) -> list[list[int]]:
    machine = Machine(folder, caching=False)
    for fork, state in enumerate(forks(8)):
        machine.submit(fork, [state])
    machine.run()
    return [machine.tokens[100 * fork] for fork in range(8)]


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("blocks", "budget"), [(200, 64), (20, 64), (14, 5)])
def test_forks_are_the_independent_runs(
    folder: Path, independent: list[list[int]], blocks: int, budget: int, caching: bool, plans: int
) -> None:
    machine = Machine(folder, blocks=blocks, caching=caching, plans=plans, budget=budget)
    machine.submit(1, forks(8))
    tokens = machine.run()
    assert [tokens[100 + fork] for fork in range(8)] == independent
    assert bool(machine.core.snapshot().preemptions) == (blocks < 200)


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_of_eight_forks_is_computed_once(folder: Path, caching: bool) -> None:
    machine = Machine(folder, caching=caching)
    machine.submit(1, forks(8))
    machine.run()
    computed = sum(sum(plan.counts) for plan in machine.plans)
    assert computed == len(PROMPT) + 7 + 8 * 11  # the last prompt token once more per fork, for logits of its own
    copies = [copy for plan in machine.plans for copy in plan.copies]
    assert len(copies) == 0  # 37 tokens: the forks begin to write at the start of a block
    machine.submit(2, forks(8), prompt=PROMPT[:-2])
    machine.run()
    assert len([copy for plan in machine.plans for copy in plan.copies]) == (8 if caching else 7)


def beams(width: int) -> list[SamplingState]:
    return [SamplingState(temperature=0.0, logprobs=max(2 * width, width + len(EOS)))] * width


def settings(width: int, penalty: float) -> BeamSettings:
    return BeamSettings(length_penalty=penalty, num_candidates=max(2 * width, width + len(EOS)))


@functools.cache
def plain_search(
    model: LlamaForCausalLM, width: int, max_tokens: int, stops: frozenset[int], penalty: float
) -> list[tuple[list[int], float]]:
    """vLLM's search, every beam computed from its first token: (generated tokens, cumulative log-probability)."""
    alive: list[tuple[list[int], float]] = [(PROMPT, 0.0)]
    complete: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        with torch.inference_mode():
            logprobs = model(torch.tensor([tokens for tokens, _ in alive])).logits[:, -1].log_softmax(-1)
        top = logprobs.topk(max(2 * width, width + len(EOS)))
        following = []
        for (tokens, total), values, ids in zip(alive, top.values.tolist(), top.indices.tolist(), strict=True):
            for value, token in zip(values, ids, strict=True):
                (complete if token in stops else following).append(([*tokens, token], total + value))
        alive = sorted(following, key=lambda beam: -beam[1])[:width]
    found = sorted(complete + alive, key=lambda beam: -beam[1] / (len(beam[0]) - (beam[0][-1] in stops)) ** penalty)[
        :width
    ]
    return [(tokens[len(PROMPT) :], total) for tokens, total in found]


@pytest.mark.parametrize(
    ("blocks", "plans", "caching"),
    [
        (200, 2, False),
        (13, 2, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((200, 1, True), (13, 1, False))),
    ],
)
@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (4, 1.0), (4, 0.0), (5, 3.0)])
@pytest.mark.parametrize("stops", [frozenset(), EOS])
def test_beams_are_the_plain_search(
    folder: Path,
    reference: LlamaForCausalLM,
    width: int,
    penalty: float,
    stops: frozenset[int],
    blocks: int,
    plans: int,
    caching: bool,
) -> None:
    machine = Machine(folder, blocks=blocks + 3 * width, caching=caching, plans=plans)
    others = 3 if blocks < 200 else 0
    for other in range(others):
        machine.submit(10 + other, [SamplingState(temperature=0.0)], max_tokens=30, prompt=PROMPT[: 20 + other])
    machine.submit(1, beams(width), max_tokens=9, eos_token_ids=stops, beam=settings(width, penalty))
    machine.run()
    expected = plain_search(reference, width, 9, stops, penalty)
    assert [machine.tokens[100 + place] for place in range(width)] == [tokens for tokens, _ in expected]
    for place, (_, total) in enumerate(expected):
        assert machine.logprobs[100 + place] == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("width", [2, 4, 7])
def test_beams_are_those_of_transformers_where_nothing_ends_early(
    folder: Path, reference: LlamaForCausalLM, width: int
) -> None:
    found = reference.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=10,
        eos_token_id=None,
        pad_token_id=0,
        length_penalty=1.0,
    )
    machine = Machine(folder)
    machine.submit(1, beams(width), max_tokens=10, beam=settings(width, 1.0))
    machine.run()
    assert [machine.tokens[100 + place] for place in range(width)] == found[:, len(PROMPT) :].tolist()
    assert 2 * width < LOGITS_WIDTH
