"""Trees of drafts in every attention for a CPU, against each node's path computed as plain tokens."""

import numpy as np
import pytest
import torch

from troupellm.kernels.paged_attention import paged_attention
from troupellm.kernels.paged_attention.backends import Needs, Planner, choose
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.paged_attention.tree import NO_TREE, TreeMask

HEADS, KV_HEADS, SIZE, PAGE = 6, 2, 32, 7
# Rows: a prompt's chunk, a chain of two known tokens with a tree behind, a single token, a tree over several blocks.
STARTS, COUNTS = np.array([3, 18, 40, 30]), np.array([20, 9, 1, 64])
TREES = {1: (20, [-1, -1, 0, 0, 2, 1, 4]), 3: (30, [-1] + [max(-1, node - 3) for node in range(63)])}


def ancestors(parents: list[int], node: int) -> list[int]:
    return [*ancestors(parents, parents[node]), node] if node >= 0 else []


def mask(window: int | None) -> TreeMask:
    bases = np.full(4, NO_TREE)
    places = np.concatenate([np.arange(start, start + count) for start, count in zip(STARTS, COUNTS, strict=True)])
    positions, seen = places.copy(), np.zeros(places.size, dtype=np.uint64)
    first = np.cumsum(COUNTS) - COUNTS
    for row, (base, parents) in TREES.items():
        bases[row] = base
        for node in range(len(parents)):
            token, path = first[row] + base - STARTS[row] + node, ancestors(parents, node)
            positions[token] = base + len(path) - 1
            for each in path if window is None else path[-window:]:
                seen[token] |= np.uint64(1 << each)
    return TreeMask(bases, seen, positions)


def expected(
    query: torch.Tensor, caches: torch.Tensor, tables: np.ndarray, window: int | None, softcap: float
) -> torch.Tensor:
    """Token by token: its keys are moved to where they would lie without a tree."""
    tree, out, token = mask(window), torch.empty_like(query), 0
    for row, (start, count) in enumerate(zip(STARTS, COUNTS, strict=True)):
        for place in range(start, start + count):
            moved, end = caches.clone(), int(tree.positions[token]) + 1
            if row in TREES and place >= TREES[row][0]:
                base, parents = TREES[row]
                for depth, node in enumerate(ancestors(parents, place - base)):
                    (there, at), (here, to) = divmod(base + node, PAGE), divmod(base + depth, PAGE)
                    moved[:, tables[row, here], :, to] = caches[:, tables[row, there], :, at]
            first = 0 if window is None else max(0, end - window)
            item = torch.tensor([[0, row, first, end]], dtype=torch.int32)
            out[token] = paged_attention_reference(
                query[token : token + 1], moved[0], moved[1], torch.from_numpy(tables), item, scale=0.2, softcap=softcap
            )[0]
            token += 1
    return out


@pytest.mark.parametrize("size", [SIZE, 272])
@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize("name", ["native", "torch", "sdpa", "reference", "by token"])
def test_a_node_sees_its_path_and_nothing_else(name: str, window: int | None, size: int) -> None:
    generator = torch.Generator().manual_seed(5)
    tables = torch.randperm(80, generator=generator)[:64].view(4, 16).to(torch.int32).numpy()
    caches = torch.randn(2, 80, KV_HEADS, PAGE, size, generator=generator)
    query = torch.randn(int(COUNTS.sum()), HEADS, size, generator=generator)
    by_token = name == "by token"
    needs = Needs(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=size,
        block_size=PAGE,
        batch_invariant=by_token,
    )
    chosen = "torch" if by_token else name
    if chosen == "native" and choose(needs).name != "native":
        pytest.skip("no compiler")
    plan = Planner(choose(needs, chosen), needs)(tables, STARTS, COUNTS, window, mask(window))
    found = paged_attention(query, caches[0], caches[1], plan, 0.2)
    assert torch.allclose(found, expected(query, caches, tables, window, 0.0), atol=2e-5)


def test_siblings_that_are_not_a_number_harm_nobody() -> None:
    generator = torch.Generator().manual_seed(6)
    tables = np.arange(64, dtype=np.int32).reshape(4, 16)
    caches = torch.randn(2, 64, KV_HEADS, PAGE, SIZE, generator=generator)
    query = torch.randn(int(COUNTS.sum()), HEADS, SIZE, generator=generator)
    needs = Needs(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        block_size=PAGE,
    )
    base = TREES[1][0]
    block, place = divmod(base, PAGE)
    plan = Planner(choose(needs), needs)(tables, STARTS, COUNTS, None, mask(None))
    healthy = paged_attention(query, caches[0], caches[1], plan, 0.2)
    caches[:, tables[1, block], :, place] = torch.nan  # the first node
    found = paged_attention(query, caches[0], caches[1], plan, 0.2)
    first = int(COUNTS[0]) + base - int(STARTS[1])
    others = [first + node for node, parent in enumerate(TREES[1][1]) if 0 not in ancestors(TREES[1][1], node)]
    assert torch.equal(found[others], healthy[others])
    assert found[first].isnan().all()
