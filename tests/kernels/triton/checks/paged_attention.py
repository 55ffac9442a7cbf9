"""The attention kernels against the reference. The cases put NaN wherever no token may look."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from troupellm.kernels.common.triton import check_device
from troupellm.kernels.kv_quant import decode
from troupellm.kernels.paged_attention import triton_launch, triton_plan
from troupellm.kernels.paged_attention.cases import CASES, Case, all_items
from troupellm.kernels.paged_attention.device_cases import DEVICE_CASES, SMALL_EXTEND, Inputs, make_device_inputs
from troupellm.kernels.paged_attention.device_plan import DevicePlan
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.paged_attention.row_plan import RowPlan
from troupellm.kernels.paged_attention.tree import NO_TREE, TreeMask

DEVICE = check_device()
BY_NAME = {case.name: case for case in (*CASES, *DEVICE_CASES)}
SLOW = (
    "bfloat16", "bfloat16_decode", "chunk_with_past", "decode_in_a_window", "decodes", "extend_in_a_window", "float16",
    "group_of_24", "group_of_7", "group_of_seven", "group_of_seven_window", "head_dim_256", "head_dim_80",
    "heads_of_80", "long_chunks", "long_window", "mixed", "page_of_32", "page_of_64", "prefill", "skewed", "sinks",
    "soft_cap", "verify", "verify_in_a_window", "wide_decodes", "wide_with_all", "window",
)  # fmt: skip
"""The others are small, and have all that these have: ragged lengths, groups of 1 to 12 heads, odd sizes, windows,
caps, sinks and numbers of two and four bytes, with blocks in a random order."""


def expected_of(case: Case, inputs: Inputs, scale: float) -> torch.Tensor:
    tables, _ = host_tables(case)
    keys, values = inputs.keys.cpu(), inputs.values.cpu()
    if keys.dtype != inputs.query.dtype:
        keys, values = decode(keys, torch.float32), decode(values, torch.float32)
    sinks = None if inputs.sinks is None else inputs.sinks.cpu()
    return paged_attention_reference(
        inputs.query.cpu(), keys, values, tables, all_items(case), scale=scale, softcap=case.softcap, sinks=sinks
    )


def host_tables(case: Case) -> tuple[torch.Tensor, AttentionPlan]:
    from troupellm.kernels.paged_attention.cases import make_inputs

    plan = make_inputs(case, "cpu", 1)[3]
    return plan.block_tables, plan


def run(case: Case, inputs: Inputs, scale: float) -> torch.Tensor:
    out = torch.full(inputs.query.shape, float("nan"), dtype=inputs.query.dtype, device=DEVICE)
    triton_launch.run(
        inputs.query,
        (inputs.keys, inputs.values),
        inputs.plan,
        scale,
        out,
        softcap=case.softcap,
        sinks=inputs.sinks,
    )
    return out.cpu()


def check(case: Case, *, tolerance: float | None = None, **options: object) -> None:
    inputs = make_device_inputs(case, DEVICE, 1, **options)
    scale = case.head_dim**-0.5
    expected = expected_of(case, inputs, scale)
    assert not expected.isnan().any()
    tolerance = case.tolerance if tolerance is None else tolerance
    torch.testing.assert_close(run(case, inputs, scale), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in sorted(BY_NAME)]
)
def test_paged_attention_equals_the_reference(name: str) -> None:
    check(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "decodes", "verify", "head_dim_256", "page_of_64", "chunk_with_past"])
def test_equals_the_reference_with_the_tiles_of_the_tables(name: str) -> None:
    check(BY_NAME[name], small=False)


@pytest.mark.slow
@pytest.mark.parametrize("programs", [17])
def test_any_number_of_programs_cuts_rows_anywhere(programs: int) -> None:
    check(BY_NAME["skewed"], programs=programs)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_cache_in_8_bits(dtype: torch.dtype) -> None:
    check(replace(BY_NAME["mixed"], starts=(0, 50, 7), counts=(17, 1, 1)), quantized=dtype, tolerance=1e-4)


def test_rows_that_pad_become_zeros() -> None:
    case = BY_NAME["edges_of_pages"]
    inputs = make_device_inputs(case, DEVICE, 1, programs=5)
    expected = run(case, inputs, 0.25)
    part = inputs.plan.decode
    part.context_lens[2], part.context_lens[6] = 0, 0
    part.block_tables[2], part.block_tables[6] = -1, -1
    inputs.query[2], inputs.query[6] = float("nan"), 0.0
    inputs.plan.refresh()
    got = run(case, inputs, 0.25)
    assert torch.equal(got[[2, 6]], torch.zeros(2, case.heads, case.head_dim))
    rest = [0, 1, 3, 4, 5]
    torch.testing.assert_close(got[rest], expected[rest], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_row_with_nan_keys_is_nan_alone() -> None:
    case = BY_NAME["edges_of_pages"]
    inputs = make_device_inputs(case, DEVICE, 1)
    clean = run(case, inputs, 0.2)
    inputs.keys[host_tables(case)[0][3, 0], :, 2] = float("nan")
    got = run(case, inputs, 0.2)
    assert got[3].isnan().all()
    rest = [0, 1, 2, 4, 5, 6]
    assert torch.equal(got[rest], clean[rest])


NO_NUMBERS = ((16, torch.float32, None), (4, torch.int8, None))
"""The quick ones: each path, and each way to store values."""


@pytest.mark.parametrize(
    ("count", "dtype", "window"),
    [
        pytest.param(*each, marks=() if each in NO_NUMBERS else pytest.mark.slow)
        for each in product((16, 4), (torch.float32, torch.bfloat16, torch.int8), (None, 20))
    ],
)
def test_a_value_that_is_no_number_stays_where_it_is_seen(count: int, dtype: torch.dtype, window: int | None) -> None:
    """Of a row with many tokens, and of one with few."""
    start, at = 50, 52
    floats = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    case = Case("whole", (start,), (count,), 2, 1, 32, dtype=floats, window=window)
    inputs = make_device_inputs(case, DEVICE, 1, quantized=None if dtype == floats else dtype)
    clean = run(case, inputs, 0.2)
    assert clean.isfinite().all()
    value = inputs.values[host_tables(case)[0][0, at // 16], :, at % 16]
    value.view(floats)[:, -1] = float("nan")  # of int8, the scale
    got = run(case, inputs, 0.2)
    sees = torch.zeros(count, dtype=torch.bool)
    sees[at - start : at - start + (window or count)] = True
    assert got[sees].isnan().all()
    assert torch.equal(got[~sees], clean[~sees])


@pytest.mark.parametrize(
    ("start", "count"), [(33, 8), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((40, 1), (0, 41)))]
)
def test_a_token_is_the_same_to_the_bit_beside_others_and_in_any_chunk(start: int, count: int) -> None:
    crowd = Case("crowd", (start, 7), (count, 12), 4, 2, 16, window=30)
    inputs = make_device_inputs(crowd, DEVICE, 1, invariant=True)
    assert inputs.plan.decode is None
    got = run(crowd, inputs, 0.25)[count - 1]
    alone = Case("alone", (40,), (1,), 4, 2, 16, window=30)
    tables = host_tables(crowd)[0].numpy()[:1].copy()
    plan = DevicePlan.from_host(
        tables,
        np.array([40]),
        np.array([1]),
        shape=inputs.plan.shape,
        device=DEVICE,
        invariant=True,
        extend=SMALL_EXTEND,
    )
    last = replace(inputs, query=inputs.query[count - 1 : count], plan=plan)
    assert torch.equal(run(alone, last, 0.25)[0], got)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decodes", "prefill"])
def test_extreme_scores_do_not_overflow(name: str) -> None:
    case = BY_NAME[name]
    inputs = make_device_inputs(case, DEVICE, 1)
    torch.testing.assert_close(run(case, inputs, 200.0), expected_of(case, inputs, 200.0), atol=1e-3, rtol=1e-3)


def test_offsets_beyond_31_bits() -> None:
    """Blocks lie 2**30 elements apart; only what is used of that memory is ever touched."""
    case = Case("far", (40,), (1,), 2, 1, 16, tolerance=1e-4)
    inputs = make_device_inputs(case, DEVICE, 1, quantized=torch.int8)
    apart = 2**30
    far = []
    for cache in (inputs.keys, inputs.values):
        blocks = cache.shape[0]
        memory = torch.empty((blocks - 1) * apart + cache[0].numel(), dtype=cache.dtype, device=DEVICE)
        spread = memory.as_strided(cache.shape, (apart, *cache.stride()[1:]))
        spread.copy_(cache)
        far.append(spread)
    near = run(case, inputs, 0.25)
    assert torch.equal(run(case, replace(inputs, keys=far[0], values=far[1]), 0.25), near)


@pytest.mark.parametrize(("window", "programs"), [(0, 1), (40, 7), (0, 20)])
def test_the_task_map_is_an_equal_share_of_all_tiles(window: int, programs: int) -> None:
    context, tile, heads, queries = np.array([1, 16, 17, 0, 300, 5]), 16, 3, 2
    tasks = torch.full((programs + 1, 4), -1, dtype=torch.int32, device=DEVICE)
    lens = torch.tensor(context, dtype=torch.int32, device=DEVICE)
    triton_plan.map_decode(lens, tasks, kv_heads=heads, queries=queries, window=window, tile=tile)
    units = []
    for row, length in enumerate(context.tolist()):
        first = max(length - queries + 1 - window, 0) // tile if window else 0
        last = max(-(-length // tile), first + 1)
        units += [(row, head, at) for head in range(heads) for at in range(first, last)]
    sharing = min(programs, len(units))
    for program, entry in enumerate(tasks.cpu().tolist()):
        unit = program * len(units) // sharing if program < sharing else len(units)
        assert entry[3] == unit
        if unit < len(units):
            assert tuple(entry[:3]) == units[unit]
        else:
            assert entry[0] == len(context)


def test_blocks_of_query_tokens() -> None:
    counts, block = np.array([5, 4, 1, 0, 9]), 4
    stops = torch.tensor(np.cumsum(counts), dtype=torch.int32, device=DEVICE)
    starts = stops - torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    blocks = torch.full((12, 2), -7, dtype=torch.int32, device=DEVICE)
    triton_plan.map_extend(starts, stops, blocks, block=block)
    expected = [[row, at] for row, count in enumerate(counts.tolist()) for at in range(-(-count // block))]
    assert blocks.cpu().tolist()[: len(expected)] == expected
    assert all(row == -1 for row, _ in blocks.cpu().tolist()[len(expected) :])


PARENTS = [-1, -1, 0, 0, 2, 1, 4]


def tree_of(starts: np.ndarray, counts: np.ndarray, window: int | None) -> TreeMask:
    """The second row ends with a tree of `PARENTS`, behind two tokens of its own."""
    places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    positions, seen, bases = places.copy(), np.zeros(places.size, np.uint64), np.full(starts.size, NO_TREE)
    base, first = int(starts[1] + counts[1]) - len(PARENTS), int(counts[0] + counts[1]) - len(PARENTS)
    bases[1] = base
    for node in range(len(PARENTS)):
        path = [node]
        while PARENTS[path[-1]] >= 0:
            path.append(PARENTS[path[-1]])
        positions[first + node] = base + len(path) - 1
        seen[first + node] = sum(1 << each for each in (path if window is None else path[:window]))
    return TreeMask(bases, seen, positions)


@pytest.mark.parametrize(
    ("window", "rows"), [(None, 32), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 32), (20, 16)))]
)
def test_a_node_of_a_tree_sees_its_path_and_nothing_else(window: int | None, rows: int) -> None:
    starts, counts = np.array([3, 18, 40]), np.array([20, 9, 1])
    case = Case("tree", tuple(starts.tolist()), tuple(counts.tolist()), 4, 2, 16, window=window)
    inputs, tree = make_device_inputs(case, DEVICE, 1), tree_of(starts, counts, window)
    tables = host_tables(case)[0]
    rowwise = RowPlan(
        tables.numpy(), starts, counts, block_size=16, window=window, device=torch.device("cpu"), tree=tree
    )
    for cache in (inputs.keys, inputs.values):
        cache.nan_to_num_(3.0)  # a tree's window reaches back further than that of tokens behind each other
    expected = paged_attention_reference(
        inputs.query.cpu(), inputs.keys.cpu(), inputs.values.cpu(), rowwise.tables, rowwise.items, scale=0.25, tree=tree
    )
    extend = replace(SMALL_EXTEND, constants={"ROWS": rows, "TILE": 16})
    plan = DevicePlan.from_host(
        tables.numpy().copy(), starts, counts, shape=inputs.plan.shape, device=DEVICE, extend=extend, tree=tree
    )
    got = run(case, replace(inputs, plan=plan), 0.25)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
