import itertools
from array import array

import anyio
import msgspec
import pytest

from troupellm.actors.input.actor import INLINE_CHARACTERS, has_short_lists, is_short
from troupellm.actors.input.tokenize import count_tokens, tokenize
from troupellm.actors.kv_cache.block_hash import KEY_BYTES, PrefixHasher, namespace
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import ContextLengthExceeded, EngineStopped, RequestFailed
from troupellm.protocol.messages.input import ChatPrompt, TextPrompt, TokensPrompt
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.tests.support.checkpoints import text_models
from troupellm.tests.support.scheduler.intake_bench import CONTEXT, VOCAB_WIDTH, Bench, FixedSeeds


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def prompt_of(submitted) -> list[int]:
    return array("i", submitted.prompt).tolist()


pytestmark = pytest.mark.anyio


async def test_a_text_becomes_an_open_request_and_a_submission(bench):
    opened, submitted = await bench.prepare(TextPrompt("the fox"), cache_salt=b"s", streaming=False, deadline=9.0)
    assert prompt_of(submitted) == bench.tokenizer.encode("the fox", add_special_tokens=True)
    assert opened.prompt_token_ids == submitted.prompt
    assert opened.rows == tuple(spec.row for spec in submitted.sequences) == (100,)
    assert (submitted.request, submitted.request_id, submitted.arrival) == (1, "r1", 1.5)
    assert (submitted.cache_salt, submitted.streaming, submitted.deadline) == (b"s", False, 9.0)
    assert submitted.max_tokens == 16
    assert submitted.eos_token_ids == {0, 1}


async def test_a_chat_goes_through_the_template_without_added_special_tokens(tmp_path):
    bench = Bench(tmp_path, text_models.byte_fallback)
    _, submitted = await bench.prepare(ChatPrompt(messages=[{"role": "user", "content": "the"}]))
    assert prompt_of(submitted) == bench.tokenizer.encode("<|start|>the", add_special_tokens=False)


async def test_the_beginning_token_is_added_to_a_text_unless_told_otherwise(tmp_path):
    bench = Bench(tmp_path, text_models.byte_fallback)
    _, submitted = await bench.prepare(TextPrompt(""))
    assert prompt_of(submitted) == [1]


async def test_a_prompt_without_special_tokens_has_no_bos(tmp_path):
    bench = Bench(tmp_path, text_models.byte_fallback)
    _, submitted = await bench.prepare(TextPrompt("the", add_special_tokens=False))
    assert 1 not in prompt_of(submitted)


async def test_all_sequences_share_a_seed_and_have_their_own_fork_and_row(bench):
    opened, submitted = await bench.prepare(TextPrompt("a"), SamplingParams(n=3, prompt_logprobs=2))
    states = [spec.sampling for spec in submitted.sequences]
    assert [state.fork for state in states] == [0, 1, 2]
    assert {state.seed for state in states} == {2**64 - 7}
    assert opened.rows == (100, 101, 102)
    assert [state.prompt_logprobs for state in states] == [2, -1, -1]


@pytest.mark.parametrize(("seed", "expected"), [(5, 5), (0, 0), (-2, 2**64 - 2), (-1, 2**64 - 7), (None, 2**64 - 7)])
async def test_seeds_are_unsigned_and_drawn_when_missing(bench, seed, expected):
    _, submitted = await bench.prepare(TextPrompt("a"), SamplingParams(seed=seed))
    assert submitted.sequences[0].sampling.seed == expected


async def test_sampling_state_is_what_the_worker_needs(bench):
    params = SamplingParams(
        temperature=1e-7,
        top_k=-1,
        logit_bias={3: 1},
        allowed_token_ids=[9, 8, 9],
        min_tokens=2,
        stop_token_ids=[7],
        logprobs=4,
        stop="x",
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    opened, submitted = await bench.prepare(TextPrompt("a"), params)
    state = submitted.sequences[0].sampling
    assert state.temperature == 0.0
    assert state.top_k == 0
    assert state.logit_bias == ((3, 1.0),)
    assert state.allowed_token_ids == (8, 9)
    assert state.stop_token_ids == (0, 1, 7)
    assert state.logprobs == 4
    assert submitted.stop_token_ids == {7}
    assert (opened.stop_strings, opened.include_stop_str_in_output, opened.min_tokens) == (("x",), True, 2)
    assert opened.skip_special_tokens is False
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submitted), type=type(submitted)) == submitted


async def test_ignore_eos_leaves_no_end_tokens(bench):
    _, submitted = await bench.prepare(TextPrompt("a"), SamplingParams(ignore_eos=True, min_tokens=1))
    assert submitted.eos_token_ids == frozenset()
    assert submitted.sequences[0].sampling.stop_token_ids == ()


async def test_bad_words_are_banned_with_and_without_a_leading_space(bench):
    _, submitted = await bench.prepare(TextPrompt("a"), SamplingParams(bad_words=["fox"]))
    banned = {bench.tokenizer.decode(ids) for ids in submitted.sequences[0].sampling.bad_words}
    assert banned == {"fox", " fox"}


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokensPrompt(())])
async def test_an_empty_prompt_is_refused(bench, prompt):
    assert (await bench.refused(prompt)).param == "prompt"


@pytest.mark.parametrize("wrong", [-1, VOCAB_WIDTH, 2**40])
async def test_token_ids_are_checked_against_the_width_of_the_logits(bench, wrong):
    error = await bench.refused(TokensPrompt((3, wrong)))
    assert error.param == "prompt"
    assert str(VOCAB_WIDTH - 1) in error.message
    assert str(wrong) in error.message


async def test_the_last_id_of_padded_logits_is_taken(bench):
    _, submitted = await bench.prepare(TokensPrompt([VOCAB_WIDTH - 1]))
    assert prompt_of(submitted) == [VOCAB_WIDTH - 1]


@pytest.mark.parametrize("ids", [["a"], [1.5], [2**70], "abc"])
async def test_token_ids_must_be_integers(bench, ids):
    assert (await bench.refused(TokensPrompt(ids))).param == "prompt"


async def test_parameters_are_checked_against_the_model(bench):
    assert (
        await bench.refused(TextPrompt("a"), SamplingParams(stop_token_ids=[VOCAB_WIDTH]))
    ).param == "stop_token_ids"


async def test_prompt_and_tokens_beyond_the_context_name_both_numbers(bench):
    error = await bench.refused(TokensPrompt([3] * 60), SamplingParams(max_tokens=5), ContextLengthExceeded)
    assert (error.limit, error.got, error.param) == (CONTEXT, 65, "max_tokens")
    assert "64" in error.message
    assert "65" in error.message


async def test_a_prompt_that_fills_the_context_is_refused(bench):
    error = await bench.refused(TokensPrompt([3] * 64), SamplingParams(max_tokens=None), ContextLengthExceeded)
    assert error.param == "prompt"


async def test_a_prompt_larger_than_the_cache_is_refused(tmp_path):
    bench = Bench(tmp_path, blocks=8)
    error = await bench.refused(TokensPrompt([3] * 30), SamplingParams(max_tokens=3), ContextLengthExceeded)
    assert (error.limit, error.got) == (32, 33)


@pytest.mark.parametrize(("blocks", "expected"), [(100, 54), (8, 22)])
async def test_without_max_tokens_a_request_gets_what_context_and_cache_leave(tmp_path, blocks, expected):
    bench = Bench(tmp_path, blocks=blocks)
    _, submitted = await bench.prepare(TokensPrompt([3] * 10), SamplingParams(max_tokens=None))
    assert submitted.max_tokens == expected


async def test_min_tokens_must_fit_too(bench):
    error = await bench.refused(TokensPrompt([3] * 10), SamplingParams(max_tokens=None, min_tokens=55))
    assert error.param == "min_tokens"


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (TextPrompt("a\ud800b"), {}, "prompt"),
        (TextPrompt("a"), {"stop": "\ud800"}, "stop"),
        (TextPrompt("a"), {"bad_words": ["\ud800"]}, "bad_words"),
    ],
)
async def test_half_of_a_surrogate_pair_is_refused(bench, prompt, params, param):
    assert (await bench.refused(prompt, SamplingParams(**params))).param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"allowed_token_ids": [5, 6], "bad_words": ["a"]}, None),
        ({"allowed_token_ids": "a", "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": "ab", "bad_words": ["a", "b"]}, "bad_words"),
        ({"allowed_token_ids": "ab", "bad_words": ["a"]}, None),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5]}, None),
    ],
)
async def test_some_token_must_be_left_to_choose(bench, options, param):
    allowed = options["allowed_token_ids"]
    if isinstance(allowed, str):
        options = options | {"allowed_token_ids": bench.tokenizer.encode(allowed, add_special_tokens=False)}
        assert len(options["allowed_token_ids"]) == len(allowed)
    prompt, params = TextPrompt("the fox"), SamplingParams(max_tokens=4, **options)
    if param is None:
        await bench.prepare(prompt, params)
    else:
        assert (await bench.refused(prompt, params)).param == param


async def test_half_of_a_surrogate_pair_in_a_conversation_is_a_replacement_character(bench):
    _, submitted = await bench.prepare(ChatPrompt(messages=[{"role": "user", "content": "a\udfffb"}]))
    text = bench.template.render([{"role": "user", "content": "a\ufffdb"}])
    assert prompt_of(submitted) == bench.tokenizer.encode(text, add_special_tokens=False)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(bench, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", None)
    text = "a" * (CONTEXT * bench.tokenizer.longest_token + 1)
    error = await bench.refused(TextPrompt(text), kind=ContextLengthExceeded)
    assert error.limit == CONTEXT
    assert error.got >= CONTEXT


async def test_too_many_token_ids_are_counted_and_not_looked_at(bench):
    error = await bench.refused(TokensPrompt(["x"] * (CONTEXT + 1)), kind=ContextLengthExceeded)
    assert (error.limit, error.got, error.param) == (CONTEXT, CONTEXT + 1, "prompt")


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt(messages=[]),
        ChatPrompt(messages=[{"role": "user", "content": None}]),
        ChatPrompt(messages=[{"role": "user"}]),
    ],
)
async def test_messages_that_the_template_refuses_are_invalid(bench, prompt):
    assert (await bench.refused(prompt)).param == "messages"


@pytest.mark.parametrize(
    "name", ["messages", "add_generation_prompt", "__class__", "tokenize", "chat_template", "self", "source"]
)
async def test_template_arguments_cannot_replace_ours(bench, name):
    prompt = ChatPrompt(messages=[{"role": "user", "content": "a"}], template_kwargs={name: 1})
    assert (await bench.refused(prompt)).param == "chat_template_kwargs"


async def test_a_text_that_breaks_the_tokenizer_fails_its_own_request_only(bench, monkeypatch):
    def broken(self, text, **options):
        raise ValueError("secret")

    monkeypatch.setattr(Tokenizer, "encode", broken)
    error = await bench.refused(TextPrompt("a"), kind=RequestFailed)
    assert "secret" not in error.message
    assert isinstance(error.__cause__, ValueError)


async def test_a_long_prompt_is_overtaken_by_short_ones(bench):
    async with anyio.create_task_group() as group:
        await group.start(bench.intake.run)
        long = await bench.put(TextPrompt("fox " * 20 * INLINE_CHARACTERS))
        other = await bench.put(ChatPrompt(messages=[{"role": "user", "content": "the fox" * INLINE_CHARACTERS}]))
        await bench.put(TextPrompt("a"))
        await anyio.wait_all_tasks_blocked()
        assert bench.scheduler.take().request == 3
        assert bench.threads.calls == 2
        bench.threads.gate.set()
        bench.inbox.close()
    assert isinstance(long.error, ContextLengthExceeded)
    assert isinstance(other.error, ContextLengthExceeded)


async def test_long_lists_in_the_parameters_are_prepared_in_a_thread(bench):
    params = SamplingParams(bad_words=["fox " * 100] * 10)
    bench.threads.gate.set()
    await bench.prepare(TextPrompt("a"), params)
    assert bench.threads.calls == 1


async def test_seeds_follow_the_order_of_arrival(bench, monkeypatch):
    seeds = itertools.count(1)
    monkeypatch.setattr(FixedSeeds, "seed", lambda _: next(seeds))
    async with anyio.create_task_group() as group:
        await group.start(bench.intake.run)
        await bench.put(TextPrompt("a"), SamplingParams(bad_words=["fox " * 100] * 10))
        await bench.put(TextPrompt("a"))
        await anyio.wait_all_tasks_blocked()
        assert bench.scheduler.take().sequences[0].sampling.seed == 2, "it has overtaken the long one"
        bench.threads.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert bench.scheduler.take().sequences[0].sampling.seed == 1
        bench.inbox.close()


@pytest.mark.parametrize(("given", "used"), [(1e-6, 0.0), (0.001, 0.01), (0.01, 0.01), (0.5, 0.5)])
async def test_tiny_temperatures_are_raised(bench, given, used):
    _, submitted = await bench.prepare(TextPrompt("a"), SamplingParams(temperature=given))
    assert submitted.sequences[0].sampling.temperature == used


async def test_neighbours_that_have_closed_mean_that_the_engine_stops(bench):
    bench.scheduler.close()
    slot = await bench.put(TextPrompt("a"))
    bench.inbox.close()
    await bench.intake.run()
    assert isinstance(slot.error, EngineStopped)


async def test_the_output_actor_hears_of_a_request_before_the_scheduler(tmp_path):
    bench = Bench(tmp_path, capacity=1)
    await bench.output.put("in the way")
    async with anyio.create_task_group() as group:
        await group.start(bench.intake.run)
        await bench.put(TextPrompt("a"))
        await anyio.wait_all_tasks_blocked()
        assert bench.scheduler.depth == 0
        bench.output.take()
        await anyio.wait_all_tasks_blocked()
        assert bench.scheduler.depth == 1
        bench.inbox.close()


@pytest.mark.parametrize("text", ["the fox", "fox " * 1000])
def test_counting_gives_as_many_tokens_as_there_are(bench, text):
    arguments = (TextPrompt(text), bench.tokenizer, bench.template, None)
    expected = bench.tokenizer.encode(text, add_special_tokens=True)
    assert count_tokens(*arguments) == len(expected)
    assert tokenize(*arguments).token_ids == expected


def test_a_text_that_cannot_fit_is_not_tokenized(bench):
    limit = CONTEXT * bench.tokenizer.longest_token
    arguments = (bench.tokenizer, bench.template, CONTEXT)
    assert count_tokens(TextPrompt("a" * limit), *arguments) > 0
    with pytest.raises(ContextLengthExceeded, match="has at least"):
        count_tokens(TextPrompt("a" * (limit + 1)), *arguments)


@pytest.mark.parametrize(
    ("prompt", "short"),
    [
        (TokensPrompt([1] * 2048), True),
        (TokensPrompt([1] * 2049), False),
        (TextPrompt("a" * 1000), True),
        (TextPrompt("a" * 1001), False),
        (ChatPrompt(messages=[{"content": [{"type": "text", "text": "a" * 1001}]}]), False),
        (ChatPrompt(messages=[{"content": "a"}] * 17), False),
        (ChatPrompt(messages=[{"content": "a"}], tools=[{"type": "function"}]), False),
    ],
)
async def test_short_prompts_are_prepared_on_the_loop(prompt, short):
    assert is_short(prompt) is short


@pytest.mark.parametrize(
    ("params", "short"),
    [
        ({}, True),
        ({"bad_words": ["a" * 400]}, True),
        ({"bad_words": ["a" * 400] * 2}, False),
        ({"stop_token_ids": [1] * 4096, "allowed_token_ids": [1] * 4097}, False),
    ],
)
async def test_which_parameters_are_prepared_on_the_loop(params, short):
    assert has_short_lists(SamplingParams(**params)) is short


async def test_block_keys_travel_with_the_request(bench):
    """Hashed here, in a thread for long prompts, so that the scheduler only looks them up."""
    hasher = PrefixHasher(bench.hash_key, 4)
    _, submitted = await bench.prepare(TokensPrompt(list(range(5, 15))), cache_salt=b"s")
    assert submitted.prompt_keys == hasher.prompt_keys(namespace(cache_salt=b"s"), submitted.prompt)
    assert len(submitted.prompt_keys) == 3 * KEY_BYTES
