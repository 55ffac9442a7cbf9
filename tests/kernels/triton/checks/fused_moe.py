"""The kernels of a mixture of experts against the reference, over memory that holds NaN where no kernel may read."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from troupellm.kernels.common.triton import check_device
from troupellm.kernels.fused_moe import Routing
from troupellm.kernels.fused_moe.cases import (
    CASES,
    CLAMPED,
    DEEPSEEK,
    DEEPSEEK_V2,
    GPT_OSS,
    MIXTRAL,
    QWEN,
    Case,
    Inputs,
    make_inputs,
)
from troupellm.kernels.fused_moe.reference import fused_moe_reference, route_reference
from troupellm.kernels.fused_moe.stacked import StackedExperts, stack
from troupellm.kernels.fused_moe.triton_align import align, most_blocks
from troupellm.kernels.fused_moe.triton_launch import fused_moe_triton
from troupellm.kernels.fused_moe.triton_route import route_triton
from troupellm.kernels.quantized_linear import Fp8, Int4Group, Int8Channel, Int8WeightOnly, Mx, QuantizedWeight, Weight

DEVICE = check_device()
BY_NAME = {case.name: case for case in CASES}
SMALL = Case("small", 3, 4, 48, 24, MIXTRAL, torch.float32, 1e-4)
ROUTINGS = {
    "softmax": Routing(top_k=3),
    "renormalized": QWEN,
    "of_chosen": GPT_OSS,
    "sigmoid": Routing(top_k=2, scoring="sigmoid", scale=0.5),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK,
    "all_experts": Routing(top_k=8),
}
QUICK = (("one_expert_each", False), ("one_token", True), ("skewed", False))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that kernels do not write is NaN, or an index out of range."""
    plain = torch.empty

    def empty(*shape: object, **options: object) -> torch.Tensor:
        tensor = plain(*shape, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", empty)


def beside_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with NaN right before and behind them."""
    around = torch.full((tensor.numel() + 512,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    around[256:-256] = tensor.flatten()
    return around[256:-256].view(tensor.shape)


def experts_of(inputs: Inputs, case: Case, kind: str) -> tuple[StackedExperts, list[Weight], list[Weight]]:
    def made(weight: torch.Tensor) -> Weight:
        match kind:
            case "fp8":
                return Fp8.quantize(weight)
            case "fp8_blocks":
                scale = torch.rand(-(-weight.shape[0] // 32), -(-weight.shape[1] // 128), device=DEVICE) + 0.5
                return Fp8(weight.to(torch.float8_e4m3fn), scale, block=(32, 128), dtype=weight.dtype)
            case "int8":
                return Int8Channel.quantize(weight)
            case "int8_groups":
                return Int8WeightOnly.quantize(weight, 16)
            case "int4":
                return Int4Group.quantize(weight, 32)
            case "int4_symmetric":
                found = Int4Group.quantize(weight, weight.shape[1])
                return Int4Group(found.codes, found.scale, dtype=weight.dtype)
            case "mx":
                generator = torch.Generator().manual_seed(int(weight.abs().sum()))
                rows, columns = weight.shape
                codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
                exponents = torch.randint(120, 124, (rows, columns // 32), generator=generator, dtype=torch.uint8)
                return Mx(codes.to(DEVICE), exponents.to(DEVICE), "fp4_e2m1", dtype=weight.dtype)
            case _:
                return weight

    gate_up, down = [made(weight) for weight in inputs.gate_up], [made(weight) for weight in inputs.down]
    stacked = StackedExperts(stack(gate_up), stack(down), inputs.gate_up_bias, inputs.down_bias, case.swiglu)
    if kind == "plain":
        stacked = replace(
            stacked,
            gate_up=replace(stacked.gate_up, values=beside_nan(stacked.gate_up.values)),
            down=replace(stacked.down, values=beside_nan(stacked.down.values)),
        )
    return stacked, gate_up, down


def dequantized(weights: list[Weight]) -> list[torch.Tensor]:
    return [weight.dequantize() if isinstance(weight, QuantizedWeight) else weight for weight in weights]


def check(case: Case, *, few: bool, kind: str = "plain") -> None:
    inputs = make_inputs(case, str(DEVICE), 1)
    weights, ids = route_reference(inputs.logits, case.routing)
    stacked, gate_up, down = experts_of(inputs, case, kind)
    assert stacked.gate_up.kind == stacked.down.kind == kind.partition("_groups")[0].partition("_symm")[0]
    got = fused_moe_triton(beside_nan(inputs.x), weights, ids.int(), stacked, few=few)
    expected = fused_moe_reference(
        inputs.x,
        weights,
        ids,
        dequantized(gate_up),
        dequantized(down),
        case.swiglu,
        None if inputs.gate_up_bias is None else tuple(inputs.gate_up_bias),
        None if inputs.down_bias is None else tuple(inputs.down_bias),
    )
    assert got.dtype == case.dtype
    torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)


PATHS = pytest.mark.parametrize("few", [False, True], ids=["sorted", "few"])


def on_paths(argument: str, **names: str) -> pytest.MarkDecorator:
    """Every name on both paths; `sorted`, `few` or `neither` of them is quick."""
    cases = []
    for name, quick in names.items():
        for few, path in ((False, "sorted"), (True, "few")):
            marks = () if quick == path else pytest.mark.slow
            cases.append(pytest.param(name, few, id=f"{name}-{path}", marks=marks))
    return pytest.mark.parametrize((argument, "few"), cases)


@on_paths("name", odd_sizes="few", clamped_with_biases="sorted", bfloat16="sorted")
def test_the_experts_sum_equals_the_reference(name: str, few: bool) -> None:
    check(replace(BY_NAME[name], tokens=3, size=17), few=few)


@on_paths("kind", fp8="few", mx="sorted", int8="few", int8_groups="sorted", int4="few", int4_symmetric="sorted")
def test_equals_the_reference_with_quantized_experts(kind: str, few: bool) -> None:
    check(replace(SMALL, hidden=96, size=32, bias=True, swiglu=CLAMPED), few=few, kind=kind)


@PATHS
def test_blocks_of_inputs_with_a_scale(few: bool) -> None:
    check(replace(SMALL, tokens=2, hidden=160, size=136, tolerance=1e-3), few=few, kind="fp8_blocks")


@pytest.mark.parametrize(
    ("name", "few"),
    [
        pytest.param(name, few, marks=() if (name, few) in QUICK else pytest.mark.slow)
        for name, few in product(sorted(BY_NAME), (False, True))
    ],
)
def test_equals_the_reference_in_more_cases(name: str, few: bool) -> None:
    case = BY_NAME[name]
    check(replace(case, tokens=min(case.tokens, 4)) if few else case, few=few)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["fp8", "mx", "int8", "int4"])
def test_quantized_experts_with_half_inputs(kind: str, dtype: torch.dtype) -> None:
    check(replace(SMALL, hidden=160, size=64, dtype=dtype, tolerance=0.1), few=False, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [40, 80, 160])
def test_larger_blocks_equal_the_reference(tokens: int) -> None:
    check(replace(SMALL, tokens=tokens, experts=2, hidden=72, size=40), few=False)


def test_results_repeat_bit_for_bit_whatever_else_is_in_the_batch() -> None:
    case = replace(SMALL, tokens=20, experts=4)
    inputs = make_inputs(case, str(DEVICE), 1)
    weights, ids = route_reference(inputs.logits, case.routing)
    stacked, _, _ = experts_of(inputs, case, "plain")
    whole = fused_moe_triton(inputs.x, weights, ids.int(), stacked, batch_invariant=True)
    alone = fused_moe_triton(inputs.x[7:8], weights[7:8], ids[7:8].int(), stacked, batch_invariant=True)
    assert torch.equal(whole[7:8], alone)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", list(ROUTINGS))
def test_routing_equals_the_reference(name: str, biased: bool) -> None:
    routing = ROUTINGS[name]
    experts = 8 if routing.groups == 1 else 12
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(5, experts + 3, generator=generator).to(DEVICE)
    logits, bias = wide[:, :experts], torch.randn(experts, generator=generator).to(DEVICE) if biased else None
    wide[:, experts:] = float("nan")
    weights, ids = route_triton(logits, routing, bias)
    expected_weights, expected_ids = route_reference(logits, routing, bias)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_token_of_nan_harms_no_other() -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[1] = float("nan")
    weights, ids = route_triton(logits, QWEN)
    assert ((ids >= 0) & (ids < 6)).all()
    assert weights.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block"), [(1, 1, 1, 16), (5, 3, 7, 16), (40, 2, 3, 32)])
def test_blocks_hold_every_slot_once(tokens: int, top_k: int, experts: int, block: int) -> None:
    ids = torch.randint(0, experts, (tokens, top_k), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    blocks = align(ids.to(DEVICE), experts, block)
    count = int(blocks.total)
    assert count <= most_blocks(ids.numel(), experts, block)
    flat, found = ids.flatten().tolist(), []
    for expert, slots in zip(
        blocks.experts[:count].tolist(), blocks.slots.view(-1, block)[:count].tolist(), strict=True
    ):
        held = [slot for slot in slots if slot != ids.numel()]
        assert held
        assert slots[: len(held)] == held == sorted(held)
        assert {flat[slot] for slot in held} == {expert}
        found += held
    assert sorted(found) == list(range(ids.numel()))
