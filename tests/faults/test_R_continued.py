"""A request that one engine began and another one ends: its reader has the tokens and the text of a solo run."""

from array import array
from typing import Any

import anyio
import pytest

from troupellm import Engine, InvalidRequest
from troupellm.protocol.messages.input import Generated
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.sampling_checks import RepetitionDetection
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.engines.fixtures import SETTINGS

pytestmark = pytest.mark.anyio

PROMPT = list(range(60, 80))
LENGTH = 48
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 2.0, "seed": 5},
    "penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.4,
    },
    "min_tokens": {
        "temperature": 2.0,
        "seed": 11,
        "min_tokens": 40,
        "stop_token_ids": list(range(0, 250, 2)),
        "ignore_eos": False,
    },
    "guided": {
        "temperature": 1.5,
        "seed": 3,
        "structured_outputs": StructuredOutputsParams(regex="([a-c]{3}-){4}[xyz]{30}"),
    },
    "json": {
        "temperature": 1.0,
        "seed": 4,
        "structured_outputs": StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {"a": {"type": "string", "minLength": 20, "maxLength": 24}},
                "required": ["a"],
                "additionalProperties": False,
            },
            disable_any_whitespace=True,
        ),
    },
    "stop_strings": {"temperature": 2.0, "seed": 8, "stop": ["q", "ab", "A", "0"], "min_tokens": 12},
    "several": {"temperature": 2.0, "seed": 9, "n": 3},
    "logprobs": {"temperature": 1.0, "seed": 2, "logprobs": 3, "prompt_logprobs": 1},
    "repetition": {"temperature": 0.0, "repetition_detection": RepetitionDetection(max_pattern_size=6, min_count=5)},
    "bias": {"temperature": 1.0, "seed": 7, "bad_words": ["a", "Zq"], "logit_bias": {70: 3.0}},
}

QUICK = ["greedy", "seeded", "guided", "several", "logprobs"]


@pytest.fixture(scope="module")
def engines(checkpoint: Any) -> Any:
    """Answers of two engines: `ask(number, params, generated)`."""

    def run(work: Any) -> Any:
        async def inside() -> Any:
            async with Engine(checkpoint, **SETTINGS) as first, Engine(checkpoint, **SETTINGS) as second:
                return await work(first, second)

        return anyio.run(inside)

    return run


def params_of(case: str) -> SamplingParams:
    return SamplingParams(**({"max_tokens": LENGTH, "ignore_eos": True} | CASES[case]))


def pack(tokens: Any) -> bytes:
    return array("i", tokens).tobytes()


async def read(engine: Engine, params: SamplingParams, generated: tuple[Generated, ...] = ()) -> Any:
    async with engine.stream(PROMPT, params, generated=generated) as stream:
        return await stream.collect()


async def continue_everywhere(case: str, first: Engine, second: Engine) -> None:
    """Cut a case at four points; the second engine must give the rest of each sequence."""
    params = params_of(case)
    whole = await read(first, params)
    for part in (1, 2, 3, 4):
        cuts = [max(1, len(choice.token_ids) * part // 5) for choice in whole.choices]
        generated = tuple(
            Generated(pack(choice.token_ids[:cut])) for choice, cut in zip(whole.choices, cuts, strict=True)
        )
        rest = await read(second, params, generated)
        for choice, tail, cut in zip(whole.choices, rest.choices, cuts, strict=True):
            assert tail.token_ids == choice.token_ids[cut:], (case, part)
            assert choice.text.endswith(tail.text)
            assert (tail.finish_reason, tail.stop_reason) == (choice.finish_reason, choice.stop_reason)
            if choice.logprobs is not None:
                assert [entry.token_id for entry in tail.logprobs] == list(tail.token_ids)
        assert rest.usage.completion_tokens == whole.usage.completion_tokens
        assert rest.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("cases", [QUICK, pytest.param([*CASES], marks=pytest.mark.slow)])
def test_another_engine_gives_the_rest_of_the_solo_tokens(engines: Any, cases: list[str]) -> None:
    async def work(first: Engine, second: Engine) -> None:
        for case in cases:
            await continue_everywhere(case, first, second)

    engines(work)


async def _texts(first: Engine, second: Engine) -> None:
    """Every cut of a text with stop strings and cut characters: nothing is told twice, and nothing is lost."""
    params = params_of("stop_strings")
    pieces = []
    async with first.stream(PROMPT, params, stream_interval=1) as stream:
        async for delta in stream:
            pieces.append((len(delta.token_ids), delta.text))
    whole = await read(first, params)
    for count in range(1, len(pieces)):
        shown = "".join(text for _, text in pieces[:count])
        known = sum(number for number, _ in pieces[:count])
        rest = await read(second, params, (Generated(pack(whole.token_ids[:known])),))
        assert shown + rest.text == whole.text, count


def test_the_text_goes_on_where_its_reader_has_it(engines: Any) -> None:
    engines(_texts)


def test_sequences_that_have_ended_are_counted_and_not_drawn_again(engines: Any) -> None:
    async def work(first: Engine, second: Engine) -> None:
        params = params_of("several")
        whole = await read(first, params)
        known = [choice.token_ids for choice in whole.choices]
        generated = (
            Generated(pack(known[0]), ended=True),
            Generated(pack(known[1][:7])),
            Generated(),
        )
        tokens: dict[int, list[int]] = {}
        async with second.stream(PROMPT, params, generated=generated) as stream:
            async for delta in stream:
                tokens.setdefault(delta.index, []).extend(delta.token_ids)
        assert tokens == {1: list(known[1][7:]), 2: list(known[2])}
        assert stream.usage.completion_tokens == 3 * LENGTH

    engines(work)


@pytest.mark.parametrize(
    ("generated", "more", "sentence"),
    [
        ((Generated(), Generated()), {}, "one entry for each of the 1 sequences, got 2"),
        ((Generated(b"abc"),), {}, "int32 token ids, got 3 bytes"),
        ((Generated(pack([5, 9_999])),), {}, "token id 9999; ids must be in"),
        ((Generated(pack([5] * LENGTH)),), {}, "has 48 tokens of a sequence"),
        ((Generated(pack([5]), ended=True),), {}, "a sequence that has not ended"),
        ((Generated(pack([5])),), {"use_beam_search": True, "temperature": 0.0}, "use_beam_search"),
    ],
)
async def test_tokens_that_no_engine_can_continue_are_refused(
    tiny_engine: Any, generated: tuple[Generated, ...], more: dict[str, Any], sentence: str
) -> None:
    async with tiny_engine() as engine:
        with pytest.raises(InvalidRequest, match=sentence) as refused:
            await engine.generate(PROMPT, SamplingParams(max_tokens=LENGTH, **more), generated=generated)
        assert refused.value.param == "generated"
        assert (await engine.generate(PROMPT, max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
