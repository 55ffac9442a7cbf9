"""Attention, layers and steps that would lead compiled code out of its memory are refused, and nothing is computed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from troupellm.kernels.cpp.checks import RefusedCall
from troupellm.kernels.fused_decoder import step as decode_step
from troupellm.kernels.paged_attention import cpu as attention
from troupellm.kernels.paged_attention.cpu import CppAttention, Rotation
from troupellm.kernels.paged_attention.tree import TreeMask
from troupellm.kernels.sampling.noise import token_codes
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code
from troupellm.tests.support.kernels.random_calls import floats, options
from troupellm.tests.support.kernels.random_decoders import Batch, Model

Call = Callable[[], object]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    needs_compiled_code()


def random() -> np.random.Generator:
    return np.random.default_rng(3)


def changed(numbers: Tensor, place: int, value: int) -> Tensor:
    found = numbers.clone()
    found.view(-1)[place] = value
    return found


HEADS, KV_HEADS, SIZE = 4, 2, 16
BATCH = Batch(np.array([9, 3]), np.array([1, 4]), np.array([[0, 1, 2], [4, 3, -1]], dtype=np.int32), 5, 6)
TOKENS = 5
CACHE = floats(random(), 6, KV_HEADS, 5, SIZE)
QUERY, PROJECTED = floats(random(), TOKENS, HEADS, SIZE), floats(random(), TOKENS, (HEADS + 2 * KV_HEADS) * SIZE)
ANGLES, SINKS = floats(random(), TOKENS, 1, 4), floats(random(), 3)


def layer(turn: Rotation | None = None, *, heads: int = HEADS, sinks: Tensor | None = None) -> CppAttention:
    function = attention.load()
    assert function is not None
    return CppAttention(function, heads, KV_HEADS, SIZE, 0.25, rotation=turn, sinks=sinks)


def attend(query: Tensor = QUERY, keys: Tensor = CACHE, values: Tensor = CACHE, batch: Batch = BATCH, **plan) -> Call:
    return lambda: layer().attend(query, (keys, values), batch.plan(KV_HEADS, None, **plan))


def write(rows: Tensor | None = None, angles: object = (ANGLES, ANGLES), projected: Tensor = PROJECTED) -> Call:
    def call() -> object:
        turned, places = layer(Rotation(None, 0.0, 8)), BATCH.rows(KV_HEADS) if rows is None else rows
        return turned.write_and_attend(projected, (CACHE, CACHE), BATCH.plan(KV_HEADS, None), places, angles)

    return call


def tables(row: int, column: int, block: int) -> Batch:
    found = BATCH.tables.copy()
    found[row, column] = block
    return replace(BATCH, tables=found)


def tree(base: int, seen: int) -> TreeMask:
    """Of the last token of the second row, at position 6."""
    bits = np.zeros(TOKENS, dtype=np.uint64)
    bits[-1] = seen
    return TreeMask(np.array([1 << 30, base]), bits, BATCH.positions)


ROWS_OF_CACHE = 6 * KV_HEADS * 5


PLACES = BATCH.rows(KV_HEADS)
ATTENTION: dict[str, tuple[Call, str]] = {
    "a block behind the last": (attend(batch=tables(0, 1, 6)), "block of a row 1 is 6, not one of 0 to 5"),
    "a block that is none": (attend(batch=tables(1, 0, -1)), "block of a row 0 is -1"),
    "a position behind the table": (attend(batch=replace(BATCH, starts=np.array([15, 3]))), "position of a job"),
    "a negative position": (attend(batch=replace(BATCH, starts=np.array([-1, 3]))), "position of a job"),
    "a row that has no table": (attend(batch=replace(BATCH, tables=BATCH.tables[:1])), "row of a job"),
    "tables of eight bytes": (
        attend(batch=replace(BATCH, tables=BATCH.tables.astype(np.int64))),
        "block tables must be",
    ),
    "blocks of another size": (attend(batch=replace(BATCH, block_size=4)), "size of a plan's blocks 0 is 4"),
    "fewer queries than tokens": (attend(QUERY[1:]), "the plan has 5 tokens, there are 4"),
    "queries of another width": (attend(QUERY[:, :, :8]), "query must be"),
    "heads that lie apart": (attend(floats(random(), TOKENS, HEADS, 2 * SIZE)[:, :, :SIZE]), "query must be"),
    "queries of another type": (attend(QUERY.double()), "query must be"),
    "a cache of another type": (attend(keys=CACHE.double()), "a cache of torch.float64"),
    "values of another type": (attend(values=CACHE.to(torch.int8)), "cache must be"),
    "fewer values than keys": (attend(values=CACHE[1:]), "cache must be"),
    "a cache of fewer heads": (attend(CACHE[:, :1].contiguous(), CACHE[:, :1].contiguous()), "must be"),
    "a cache that is not contiguous": (attend(keys=CACHE.transpose(1, 2)), "cache must be"),
    "codes without their scales": (attend(keys=CACHE.to(torch.int8), values=CACHE.to(torch.int8)), "cache must be"),
    "a tree's token that does not see itself": (attend(tree=tree(5, 0b01)), "token that sees itself"),
    "a tree of too many nodes": (
        attend(batch=replace(BATCH, starts=np.array([9, 90]), tables=np.zeros((2, 20), np.int32)), tree=tree(20, 1)),
        "base of a tree",
    ),
    "a negative base": (attend(tree=tree(-1, 1)), "base of a tree"),
    "a cache row behind the last": (write(changed(PLACES, 3, ROWS_OF_CACHE)), "cache row 3 is 60"),
    "a negative cache row": (write(changed(PLACES, 0, -1)), "cache row 0 is -1"),
    "fewer cache rows": (write(PLACES[1:]), "rows must be"),
    "cache rows of four bytes": (write(PLACES.int()), "rows must be"),
    "no angles": (write(angles=None), "angles are given"),
    "fewer angles": (write(angles=(ANGLES[1:], ANGLES[1:])), "angles must be"),
    "angles of another type": (write(angles=(ANGLES, ANGLES.double())), "angles must be"),
    "narrow projections": (write(projected=PROJECTED[:, 1:]), "projected must be"),
    "projections that lie apart": (
        write(projected=floats(random(), TOKENS, 200)[:, : PROJECTED.shape[1]]),
        "200 numbers apart, not 128",
    ),
    "more rotated numbers than there are": (lambda: layer(Rotation(None, 0.0, 18)), "18 rotated numbers of 16"),
    "a norm of another size": (lambda: layer(Rotation((SINKS, SINKS), 0.0, 0)), "a norm of heads must be"),
    "sinks of fewer heads": (lambda: layer(sinks=SINKS), "sinks must be"),
    "heads that no group has": (lambda: layer(heads=5), "5 heads over 2 KV heads"),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_refuses_arguments_that_do_not_fit(name: str) -> None:
    call, text = ATTENTION[name]
    with pytest.raises(RefusedCall, match=text):
        call()


class Step:
    """A good step of a small model, of which tests change one thing."""

    def __init__(self) -> None:
        models = (Model(np.random.default_rng(seed)) for seed in range(100))
        self.model = next(model for model in models if self.fits(model))
        self.batch = Batch(np.array([9, 3]), np.array([1, 1]), BATCH.tables, 5, 6)
        self.caches = self.model.caches(random(), self.batch)
        self.plan, self.rows = self.batch.plan(self.model.kv_heads, None), self.batch.rows(self.model.kv_heads)
        self.residual = floats(random(), 2, self.model.hidden)

    @staticmethod
    def fits(model: Model) -> bool:
        """There is of everything what a test changes: rotations, views, layers, a table of embeddings."""
        return model.half > 0 and model.layers.num_views == 2 < 1 + len(model.parts) and not model.in_blocks

    def layers(self, **changes: object) -> Call:
        model, batch = self.model, self.batch
        views = [(batch.plan(model.kv_heads, window), batch.rows(model.kv_heads)) for window in model.windows]
        given: dict = {
            "residual": self.residual.clone(),
            "positions": torch.tensor([9, 3]),
            "views": views,
            "rotations": model.rotations,
            "caches": self.caches,
            "keep": None,
        }
        return lambda: model.layers.run(**given | changes)

    def ends(self, embedding: Tensor) -> decode_step.Ends:
        return decode_step.Ends(embedding, 1.0, self.model.norm, 1e-5, self.model.head)

    def shorter(self) -> list:
        """Caches of which the last one has a block less."""
        keys, values = self.caches[-1]
        return [*self.caches[:-1], (keys[1:], values[1:])]

    def view(self, **changes: object) -> list:
        batch = replace(self.batch, **changes)
        return [(batch.plan(self.model.kv_heads, None), self.batch.rows(self.model.kv_heads))] * 2

    def memory(self, **changes: np.ndarray) -> decode_step.RowMemory:
        arrays = {
            "tokens": np.zeros((3, 20), dtype=np.int32), "lengths": np.array([10, 4, 1]),
            "blocks": np.concatenate((BATCH.tables, BATCH.tables[:1]))[None].copy(), "num_blocks": np.full((1, 3), 3),
        }  # fmt: skip
        return decode_step.RowMemory(**arrays | changes)

    def decode(self, **changes: object) -> Call:
        model, ends = self.model, self.ends(self.model.embedding)
        codes = token_codes(model.vocab, torch.device("cpu"))
        given: dict = {
            "layers": model.layers,
            "rotations": model.rotations,
            "caches": self.caches,
            "ends": ends,
            "views": [(0, 0), (0, 5)],
            "codes": codes,
        }
        run: dict = {
            "memory": self.memory(),
            "columns": options(random(), 4),
            "slots": np.array([0, 1]),
            "option_slots": np.array([3, 0]),
            "starts": [9, 3],
        }
        made = {name: changes.pop(name) for name in given if name in changes}

        def call() -> object:
            step = decode_step.decode_step(**given | made)
            assert step is not None
            return step.run(**run | changes)

        return call


STEPS: dict[str, tuple[Callable[[Step], object], str]] = {
    "a kept row behind the last": (
        lambda step: step.layers(keep=torch.tensor([0, 2]))(),
        "kept row 1 is 2, not one of 0 to 1",
    ),
    "a negative kept row": (lambda step: step.layers(keep=torch.tensor([-1]))(), "kept row 0 is -1"),
    "kept rows of four bytes": (lambda step: step.layers(keep=torch.tensor([0], dtype=torch.int32))(), "keep must be"),
    "a position behind the angles": (lambda step: step.layers(positions=torch.tensor([9, 200]))(), "position 1 is 200"),
    "a negative position": (lambda step: step.layers(positions=torch.tensor([-1, 3]))(), "position 0 is -1"),
    "fewer positions": (lambda step: step.layers(positions=torch.tensor([9]))(), "positions must be"),
    "a wide residual": (
        lambda step: step.layers(residual=floats(random(), 2, step.model.hidden + 1))(),
        "residual must be",
    ),
    "one view": (lambda step: step.layers(views=[(step.plan, step.rows)])(), "1 views of the cache"),
    "a cache row behind the last": (
        lambda step: step.layers(views=[(step.plan, changed(step.rows, 0, 10**6))] * 2)(),
        "cache row 0 is",
    ),
    "fewer cache rows": (lambda step: step.layers(views=[(step.plan, step.rows[1:])] * 2)(), "rows must be"),
    "a block behind the last": (lambda step: step.layers(views=step.view(tables=BATCH.tables + 9))(), "block of a row"),
    "more tokens than rows": (lambda step: step.layers(views=step.view(counts=np.array([1, 2])))(), "of a job"),
    "blocks of another size": (lambda step: step.layers(views=step.view(block_size=4))(), "size of a plan's blocks"),
    "caches of other sizes": (lambda step: step.layers(caches=step.shorter())(), "differ in type or size"),
    "a cache too few": (lambda step: step.layers(caches=step.caches[1:])(), "caches of"),
    "no rotations": (lambda step: step.layers(rotations=[])(), "0 rotations"),
    "a slot behind the last": (lambda step: step.decode(slots=np.array([0, 3]))(), "slot 1 is 3, not one of 0 to 2"),
    "a negative slot": (lambda step: step.decode(slots=np.array([-1, 1]))(), "slot 0 is -1"),
    "a slot twice": (lambda step: step.decode(slots=np.array([0, 0]), starts=[9, 9])(), "a slot stands there twice"),
    "a slot of options behind the last": (
        lambda step: step.decode(option_slots=np.array([4, 0]))(),
        "slot of options 0 is 4",
    ),
    "fewer slots than rows": (lambda step: step.decode(starts=[9, 3, 3])(), "2 slots of 3 rows"),
    "a group that has no blocks": (
        lambda step: step.decode(views=[(1, 0), (0, 5)])(),
        "blocks of 1 groups, the model has 2",
    ),
    "one view of two": (lambda step: step.decode(views=[(0, 0)])(), "1 views of the cache"),
    "an embedding of another width": (
        lambda step: step.decode(ends=step.ends(step.model.embedding[:, 1:].contiguous()))(),
        "embedding must be",
    ),
    "fewer codes": (lambda step: step.decode(codes=token_codes(1, torch.device("cpu")))(), "codes must be"),
    "tokens of eight bytes": (lambda step: step.memory(tokens=np.zeros((3, 20), dtype=np.int64)), "tokens must be"),
    "fewer lengths": (lambda step: step.memory(lengths=np.array([1, 2])), "lengths must be"),
    "blocks of fewer slots": (lambda step: step.memory(blocks=np.zeros((1, 2, 3), dtype=np.int32)), "must be"),
}


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


def test_a_step_is_computed_where_nothing_is_wrong(step: Step) -> None:
    step.layers()()
    assert step.decode()() is not None


@pytest.mark.parametrize("name", STEPS)
def test_decoder_layers_and_decode_steps_refuse(name: str, step: Step) -> None:
    call, text = STEPS[name]
    with pytest.raises(RefusedCall, match=text):
        call(step)


@pytest.mark.parametrize(
    "changes",
    [
        {"starts": [9, 4]}, {"starts": [10, 3]}, {"lengths": np.array([10, 30, 1])},
        {"tokens": np.full((3, 20), -1, dtype=np.int32)}, {"tokens": np.full((3, 20), 10**6, dtype=np.int32)},
        {"blocks": np.full((1, 3, 3), 6, dtype=np.int32)}, {"blocks": np.full((1, 3, 3), -1, dtype=np.int32)},
        {"num_blocks": np.zeros((1, 3), dtype=np.int64)},
    ],
)  # fmt: skip
def test_a_row_that_does_not_go_on_from_its_last_token_is_left_to_others(changes: dict, step: Step) -> None:
    memory = step.memory(**{name: value for name, value in changes.items() if name != "starts"})
    assert step.decode(memory=memory, starts=changes.get("starts", [9, 3]))() is None
