"""best_of and beam search through HTTP and through `LLM`."""

import pytest

from troupellm import LLM, BeamSearchParams, InvalidRequest, SamplingParams
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

PROMPT = {"model": "tiny", "prompt": "Once", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


async def post(client, route="completions", **fields):
    response = await client.post(f"/v1/{route}", json=PROMPT | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_best_of_returns_the_likeliest_of_all(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        every = await post(client, n=5, seed=3, logprobs=0)
        best = await post(client, n=2, best_of=5, seed=3)
        described = await post(client, n=2, best_of=5, seed=3, logprobs=1)
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]]
    order = sorted(range(5), key=lambda index: -totals[index])
    expected = [every["choices"][index]["token_ids"] for index in order[:2]]
    for answer, logprobs in ((best, False), (described, True)):
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert all(bool(choice["logprobs"]) == logprobs for choice in answer["choices"])
    assert best["usage"]["completion_tokens"] == 30


async def test_beams_over_completions_and_chat(tiny_engine):
    messages = [{"role": "user", "content": "Hi"}]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        text = await post(client, n=3, use_beam_search=True, logprobs=2)
        again = await post(client, n=3, use_beam_search=True, temperature=0)
        greedy = await post(client, temperature=0, logprobs=0)
        two = await post(client, prompt=["Once", "Twice"], n=2, use_beam_search=True, length_penalty=0.0)
        chat = await post(client, "chat/completions", messages=messages, n=2, use_beam_search=True, early_stopping=True)
    assert [choice["index"] for choice in text["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in text["choices"]] == [choice["token_ids"] for choice in again["choices"]]
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in text["choices"]]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] >= sum(greedy["choices"][0]["logprobs"]["token_logprobs"]) - 1e-4
    assert len({tuple(choice["token_ids"]) for choice in text["choices"]}) == 3
    assert again["choices"][0]["logprobs"] is None
    assert again["usage"]["completion_tokens"] == 18
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert len(chat["choices"]) == 2
    assert all(choice["message"]["content"] for choice in chat["choices"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"n": 2, "use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"n": 2, "use_beam_search": True, "temperature": 1.0}, "temperature"),
        ({"n": 2, "use_beam_search": True, "stop": "x"}, "stop"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"n": 60, "use_beam_search": True, "max_tokens": 4000}, "n"),
    ],
)
async def test_impossible_numbers_of_choices_are_refused_by_name(tiny_engine, fields, param):
    async with (
        tiny_engine(num_gpu_blocks_override=600) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        response = await client.post("/v1/completions", json=PROMPT | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_embedded_streams_cannot_choose_either(tiny_engine):
    async with tiny_engine() as engine:
        with pytest.raises(InvalidRequest, match="best_of cannot be streamed"):
            engine.stream("Once", n=1, best_of=2)
        best = await engine.generate("Once", SamplingParams(n=1, best_of=3, max_tokens=4, seed=1, ignore_eos=True))
        assert len(best.choices) == 1
        assert best.choices[0].logprobs is None
        assert best.choices[0].cumulative_logprob is not None
        assert best.usage.completion_tokens == 12


def test_llm_beam_search_finds_the_sequences_of_generate(tmp_path):
    with LLM(write_tiny_model(tmp_path / "tiny"), device="cpu", num_gpu_blocks_override=600) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
        (first, second) = llm.beam_search(["Once", {"prompt_token_ids": [70, 71]}], params)
        (direct,) = llm.generate(
            "Once", SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=5, ignore_eos=True), False
        )
        with pytest.raises(InvalidRequest, match="beam_width must be in"):
            llm.beam_search("Once", BeamSearchParams(beam_width=0, max_tokens=5))
        with pytest.raises(InvalidRequest, match="temperature must be 0 with use_beam_search"):
            llm.beam_search("Once", BeamSearchParams(beam_width=2, max_tokens=5, temperature=0.5))
    assert [beam.tokens for beam in first.sequences] == [
        direct.prompt_token_ids + list(answer.token_ids) for answer in direct.outputs
    ]
    assert [beam.cum_logprob for beam in first.sequences] == [answer.cumulative_logprob for answer in direct.outputs]
    assert first.sequences[0].text.startswith("Once")
    assert len(first.sequences[0].logprobs) == 5
    assert len(first.sequences[0].logprobs[0]) == 6
    assert second.sequences[0].tokens[:2] == [70, 71]
    assert {beam.finish_reason for beam in second.sequences} == {"length"}
