"""Published GGUF files behind `troupellm serve FILE.gguf`, against transformers and llama.cpp."""

import math
from dataclasses import dataclass

import anyio
import pytest

from troupellm.tests.support.checkpoints.awkward_texts import TEXTS
from troupellm.tests.support.checkpoints.observed import Reference, Served, check_greedy, serve
from troupellm.tests.support.checkpoints.real_models import FILES, real_model
from troupellm.tests.support.checkpoints.real_prompts import ALICE, PROMPTS
from troupellm.tests.support.gguf import llama_cpp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Case:
    """One file: answers of its server, and the reference of the same file."""

    name: str
    served: Served
    reference: Reference


@pytest.fixture(scope="module", params=FILES)
def case(request: pytest.FixtureRequest) -> Case:
    path = real_model(request.param)

    async def ask() -> Served:
        return await serve(path, PROMPTS, tokens=NEW_TOKENS, text=ALICE, texts=TEXTS)

    return Case(request.param, anyio.run(ask), Reference(path))


def test_greedy_tokens_are_those_of_transformers(case: Case) -> None:
    assert [len(answer.tokens) for answer in case.served.answers] == [NEW_TOKENS] * 20
    check_greedy(case.reference, case.served.answers)


def test_the_perplexity_of_a_text_is_that_of_transformers(case: Case) -> None:
    expected = case.reference.logprobs(case.served.text)
    assert len(case.served.logprobs) == len(expected) > 512  # past Gemma's window
    found, wanted = (math.exp(-sum(values) / len(values)) for values in (case.served.logprobs, expected.tolist()))
    assert found == pytest.approx(wanted, rel=5e-4)


def test_eight_bits_of_inputs_change_the_perplexity_by_less_than_a_hundredth(case: Case) -> None:
    async def ask() -> Served:
        return await serve(real_model(case.name), PROMPTS[:1], "--gguf-inputs", "int8", tokens=1, text=ALICE, texts=())

    values = anyio.run(ask).logprobs
    found, wanted = (math.exp(-sum(of) / len(of)) for of in (values, case.served.logprobs))
    assert found != wanted
    assert found == pytest.approx(wanted, rel=1e-2)


def test_token_ids_of_awkward_texts_are_those_of_llama_cpp(case: Case) -> None:
    assert len(TEXTS) >= 100
    (expected,) = llama_cpp.token_ids([(real_model(case.name), TEXTS)])
    different = [each for each in zip(TEXTS, case.served.ids, expected, strict=True) if each[1] != each[2]]
    assert not different
