"""Arguments that would lead compiled code out of its memory are refused with a sentence, and nothing is computed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from troupellm.kernels.cpp.checks import RefusedCall
from troupellm.kernels.linear import pack
from troupellm.kernels.quantized_linear import Int4Group, Int8Channel, cpu_int8, cpu_packed
from troupellm.kernels.quantized_linear.packed_weights import packed_weight
from troupellm.kernels.sampling import cpu as sampling
from troupellm.kernels.sampling.noise import position_keys, token_codes
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code
from troupellm.tests.support.kernels.random_calls import floats, options

DEPTH, OUTS, ROWS, VOCAB = 32, 64, 5, 70
Call = Callable[[], object]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    needs_compiled_code()


def random() -> np.random.Generator:
    return np.random.default_rng(3)


def product(kind: str, outs: int = OUTS, bias: Tensor | None = None):
    """A compiled product of each kind."""
    plain = floats(random(), outs, DEPTH)
    weight = {"float": plain, "int8": Int8Channel.quantize(plain), "coded": Int4Group.quantize(plain, 32)}[kind]
    native = pack(weight, bias).native
    assert native is not None
    return native


X, NORM, OUT = floats(random(), ROWS, DEPTH), floats(random(), DEPTH), floats(random(), ROWS, OUTS)
PRODUCTS: dict[str, tuple[Callable[[str], object], str]] = {
    "inputs of another depth": (lambda kind: product(kind).linear(X[:, :-1], None, 0.0, None, 1.0), "x must be"),
    "inputs of another type": (lambda kind: product(kind).linear(X.double(), None, 0.0, None, 1.0), "x must be"),
    "numbers of a row apart": (
        lambda kind: product(kind).linear(X.T.contiguous().T, None, 0.0, None, 1.0),
        "with contiguous rows",
    ),
    "a short norm": (lambda kind: product(kind).linear(X, NORM[1:], 1e-5, None, 1.0), "norm must be"),
    "a norm in eight bytes": (lambda kind: product(kind).linear(X, NORM.double(), 1e-5, None, 1.0), "norm must be"),
    "a short norm before a gate": (lambda kind: product(kind).gated(X, NORM[1:], 1e-5, "silu"), "norm must be"),
    "inputs of a gate of another depth": (lambda kind: product(kind).gated(X[:, :-1], None, 0.0, "silu"), "x must be"),
    "a narrow sum": (lambda kind: product(kind).linear(X, None, 0.0, OUT[:, 1:], 1.0), "out must be"),
    "a sum of fewer rows": (lambda kind: product(kind).linear(X, None, 0.0, OUT[1:], 1.0), "out must be"),
    "a sum whose rows overlap": (
        lambda kind: product(kind).linear(X, None, 0.0, OUT[:1].expand(ROWS, -1), 1.0),
        "out must be",
    ),
    "a sum of another type": (lambda kind: product(kind).linear(X, None, 0.0, OUT.double(), 1.0), "out must be"),
    "halves that are no vectors": (lambda kind: product(kind, 48).gated(X, None, 0.0, "silu"), "halves of 48"),
}


@pytest.mark.parametrize("kind", ["float", "int8", "coded"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_refuses_arguments_that_do_not_fit(kind: str, name: str) -> None:
    call, text = PRODUCTS[name]
    with pytest.raises(RefusedCall, match=text):
        call(kind)


def coded_with(**changes: object) -> Call:
    def make() -> object:
        codes, functions = packed_weight(Int4Group.quantize(floats(random(), OUTS, DEPTH), 16)), cpu_packed.load()
        assert codes is not None
        assert functions is not None
        return cpu_packed.PackedProduct(functions, replace(codes, **changes), (OUTS, DEPTH), None)

    return make


def int8_of(size: int) -> object:
    weight, functions = Int8Channel.quantize(floats(random(), OUTS, DEPTH)), cpu_int8.compiled()
    assert functions is not None
    panels = cpu_int8.in_panels(weight.values, 64).flatten()[:size]
    return cpu_int8.Int8FewRows(functions, panels, 64, weight, None)


WEIGHTS: dict[str, tuple[Call, str]] = {
    "a bias of fewer outputs": (lambda: product("float", bias=floats(random(), OUTS - 1)), "bias must be"),
    "a bias of codes": (lambda: product("coded", bias=floats(random(), OUTS - 1)), "a bias of another size"),
    "fewer codes": (coded_with(codes=torch.zeros(OUTS, DEPTH // 2 - 1, dtype=torch.uint8)), "codes must be"),
    "groups that do not divide": (coded_with(scale=floats(random(), OUTS, 3)), "3 groups of 32 inputs"),
    "fewer scales": (coded_with(scale=floats(random(), OUTS - 1, 2)), "scale must be"),
    "fewer offsets": (coded_with(offset=floats(random(), OUTS, 1)), "scale must be"),
    "a short table": (coded_with(table=torch.zeros(15, dtype=torch.int8)), "table must be"),
    "no table": (coded_with(table=None), "have a table"),
    "less memory than panels": (lambda: int8_of(64 * 64 - 1), "a weight of 4095 bytes, not 4096"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_refused_when_it_is_loaded(name: str) -> None:
    make, text = WEIGHTS[name]
    with pytest.raises(RefusedCall, match=text):
        make()


def functions() -> sampling.Functions:
    found = sampling.compiled()
    assert found is not None
    return found


LOGITS, CODES = floats(random(), ROWS, VOCAB), token_codes(VOCAB, torch.device("cpu"))
EVERY, BITS = torch.arange(ROWS), torch.full((ROWS, 3), -1, dtype=torch.int32)


def choose(**changes: object) -> Call:
    places = np.arange(ROWS)
    given: dict = {
        "logits": LOGITS,
        "columns": options(random(), ROWS),
        "slots": places,
        "positions": places,
        "codes": CODES,
        "guided": EVERY,
        "bits": BITS,
    }
    return lambda: functions().choose(**given | changes)


def changed(numbers: Tensor, place: int, value: int) -> Tensor:
    found = numbers.clone()
    found.view(-1)[place] = value
    return found


KEYS = position_keys(EVERY, EVERY)
SAMPLING: dict[str, tuple[Call, str]] = {
    "logits of another type": (choose(logits=LOGITS.double()), "logits must be"),
    "fewer codes": (choose(codes=CODES[1:]), "codes must be"),
    "fewer slots": (choose(slots=np.arange(ROWS - 1)), "slots must be"),
    "slots of four bytes": (choose(slots=np.arange(ROWS, dtype=np.int32)), "slots must be"),
    "fewer positions": (choose(positions=np.arange(ROWS - 1)), "positions must be"),
    "a slot behind the last": (choose(slots=np.array([0, 1, 2, 3, ROWS])), "slot of options 4 is 5, not one of 0 to 4"),
    "a negative slot": (choose(slots=np.array([0, -1, 2, 3, 4])), "slot of options 1 is -1"),
    "columns of another type": (
        lambda: sampling.Columns(np.arange(3), np.zeros(3), np.zeros(3, np.float32)),
        "scales must be",
    ),
    "columns of other lengths": (
        lambda: sampling.Columns(np.arange(3), np.zeros(3, np.float32), np.zeros(2, np.float32)),
        "floors must be",
    ),
    "a mask of a row that is not there": (choose(guided=changed(EVERY, 4, ROWS)), "row of a mask 4 is 5"),
    "masks that go back": (choose(guided=changed(EVERY, 2, 1)), "row of a mask 2 is 1, not one of 2 to 4"),
    "more masks than rows": (choose(bits=BITS[1:]), "guided must be"),
    "masks of too few words": (choose(bits=BITS[:, :2].contiguous()), "number of words of a mask 0 is 2"),
    "masks without rows": (choose(guided=None), "given together"),
    "kept bits of a row that is not there": (
        lambda: functions().keep_bits(LOGITS.clone(), changed(EVERY, 0, -1), BITS),
        "row of a mask 0 is -1",
    ),
    "kept bits of too few words": (
        lambda: functions().keep_bits(LOGITS.clone(), EVERY, BITS[:, :2].contiguous()),
        "number of words",
    ),
    "kept bits of another type": (lambda: functions().keep_bits(LOGITS.clone(), EVERY, BITS.long()), "bits must be"),
    "fewer keys": (lambda: functions().draw(LOGITS, KEYS[1:], CODES), "keys must be"),
    "fewer codes of a draw": (lambda: functions().draw(LOGITS, KEYS, CODES[1:]), "codes must be"),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_refuses_arguments_that_do_not_fit(name: str) -> None:
    call, text = SAMPLING[name]
    with pytest.raises(RefusedCall, match=text):
        call()
