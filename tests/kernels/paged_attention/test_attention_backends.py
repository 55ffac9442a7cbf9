"""Every back end that a CPU has against the reference, and what is refused."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from troupellm.kernels.common.triton import installed
from troupellm.kernels.kv_quant import decode
from troupellm.kernels.paged_attention import paged_attention
from troupellm.kernels.paged_attention.backends import BACKENDS, Flex, Needs, Planner, choose
from troupellm.kernels.paged_attention.cases import CASES, Case, all_items, make_inputs
from troupellm.kernels.paged_attention.cpu import ROUNDED
from troupellm.kernels.paged_attention.device_cases import give_back, poisoned_cache
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.protocol.errors import ConfigError

CPU = torch.device("cpu")
PLAIN = Needs(device=CPU, dtype=torch.float32, num_heads=8, num_kv_heads=2, head_dim=64, block_size=16)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


def needs_of(case: Case) -> Needs:
    return Needs(
        device=CPU,
        dtype=case.dtype,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        softcap=case.softcap > 0,
        sinks=case.sinks,
    )


def check(case: Case, planner: Planner) -> None:
    """With two more tokens than the plan has, which become zeros, and without the blocks behind a window."""
    query, keys, values, plan = make_inputs(case, "cpu", 1)
    scale = case.head_dim**-0.5
    generator = torch.Generator().manual_seed(2)
    sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
    expected = paged_attention_reference(
        query, keys, values, plan.block_tables, all_items(case), scale=scale, softcap=case.softcap, sinks=sinks
    )
    tables = plan.block_tables.numpy().copy()
    if case.window is not None:
        give_back(case, tables, keys, values)
    planned = planner(tables, np.asarray(case.starts), np.asarray(case.counts), case.window)
    longer = torch.cat((query, query[:1], query[:1]))
    got = paged_attention(longer, keys, values, planned, scale, softcap=case.softcap, sinks=sinks)
    torch.testing.assert_close(got[:-2], expected, atol=case.tolerance, rtol=case.tolerance)
    assert torch.equal(got[-2:], torch.zeros_like(got[-2:]))


@pytest.mark.parametrize("name", ["torch", "sdpa", "reference", pytest.param("native", marks=needs_compiler)])
def test_all_that_can_equal_the_reference(name: str) -> None:
    taken = 0
    for case in CASES:
        needs = needs_of(case)
        backend = next(backend for backend in BACKENDS if backend.name == name)
        if backend.refuses(needs) is None:
            check(case, Planner(choose(needs, name), needs))
            taken += 1
    assert taken > len(CASES) // 3


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["torch", "sdpa", pytest.param("native", marks=needs_compiler)])
def test_caches_in_8_bits(name: str, dtype: torch.dtype) -> None:
    case = next(case for case in CASES if case.name == "mixed")
    planner = Planner(choose(needs := replace(needs_of(case), kv_dtype=dtype), name), needs)
    query, keys, values, plan = make_inputs(case, "cpu", 1)
    keys, values = poisoned_cache(keys, dtype), poisoned_cache(values, dtype)
    expected = paged_attention_reference(
        query, decode(keys, torch.float32), decode(values, torch.float32), plan.block_tables, all_items(case), scale=0.2
    )
    planned = planner(plan.block_tables.numpy(), np.asarray(case.starts), np.asarray(case.counts), None)
    got = paged_attention(query, keys, values, planned, 0.2)
    allowed = ROUNDED * float(expected.abs().max()) if name == "native" else 1e-5
    torch.testing.assert_close(got, expected, atol=allowed, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated")
@pytest.mark.parametrize("name", ["sinks_window_cap", "chunk_with_past"])
def test_flex_attention_by_its_definition(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    check(case, Planner(Flex(), needs_of(case)))


@needs_compiler
def test_the_first_that_can_is_taken() -> None:
    assert choose(PLAIN).name == "native"
    assert choose(replace(PLAIN, dtype=torch.bfloat16)).name == "torch"
    assert choose(replace(PLAIN, head_dim=24)).name == "torch"
    assert choose(replace(PLAIN, device=torch.device("cuda"))).name == ("sdpa" if not triton_runs() else "triton")


def triton_runs() -> bool:
    """Whether the back end counts as there: on a GPU the package is all it asks for."""
    return installed()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("triton", {}, "GPU|not installed"),
        ("native", {"dtype": torch.bfloat16}, "float32, not in torch.bfloat16"),
        ("native", {"head_dim": 24}, "multiple of 16 up to 1024, not of 24"),
        ("sdpa", {"softcap": True}, "no soft cap"),
        ("reference", {"kv_dtype": torch.float8_e4m3fn}, "not of torch.float8_e4m3fn"),
        ("sdpa", {"batch_invariant": True}, "not batch-invariant"),
        ("flex", {}, "compiled for GPUs only"),
        ("torch", {"device": torch.device("cuda")}, "runs on a CPU, and the device is cuda"),
        ("flashinfer", {}, "not known; one of auto, triton, native, torch, sdpa, flex, reference"),
    ],
)
def test_what_cannot_is_refused_by_name(name: str, changes: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        choose(replace(PLAIN, **changes), name)
    assert caught.value.param == "attention_backend"
    assert name in caught.value.message


def test_a_refusal_says_who_can() -> None:
    with pytest.raises(ConfigError, match="here one of auto, torch, reference can"):
        choose(replace(PLAIN, softcap=True, head_dim=24), "sdpa")


ON_CUDA = replace(PLAIN, device=torch.device("cuda"), batch_invariant=True)
LATENT = replace(ON_CUDA, latent=512)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (
            replace(LATENT, kv_dtype=torch.float8_e4m3fn),
            (
                "shares the tiles of latent vectors" if installed() else "needs the package triton",
                "sdpa orders its sums",
                "reference reads caches of the type of the model, not of torch.float8_e4m3fn",
                "set kv_cache_dtype auto or no batch_invariant or device cpu",
            ),
        ),
        (replace(LATENT, kv_dtype=torch.int8), ("kv_cache_dtype auto or no batch_invariant or device cpu",)),
        (replace(ON_CUDA, head_dim=544, kv_dtype=torch.int8), ("kv_cache_dtype auto or no batch_invariant",)),
    ],
)
@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_where_none_can_it_says_why_and_what_to_change(needs: Needs, said: tuple[str, ...], name: str) -> None:
    with pytest.raises(ConfigError, match="no back end can") as caught:
        choose(needs, name)
    assert caught.value.param == "attention_backend"
    assert all(part in caught.value.message for part in said)


@pytest.mark.parametrize("change", [{"kv_dtype": None}, {"batch_invariant": False}, {"device": CPU}])
def test_each_change_that_a_refusal_names_is_enough(change: dict) -> None:
    for needs in (LATENT, replace(ON_CUDA, head_dim=544)):
        assert choose(replace(replace(needs, kv_dtype=torch.int8), **change))


def test_names_as_vllm_spells_them() -> None:
    assert choose(PLAIN, "TORCH_SDPA").name == "sdpa"
    assert choose(PLAIN, "CPU_ATTN").name == "torch"
