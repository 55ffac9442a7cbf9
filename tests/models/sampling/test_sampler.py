"""The batched sampler against the reference, row by row and in crowds."""

import random

import numpy as np
import pytest
import torch

from troupellm.kernels.sampling import cpu, reference
from troupellm.kernels.sampling.cases import CASES, VOCAB, make_logits
from troupellm.models.sampling.logprobs import prompt_logprobs
from troupellm.models.sampling.plain_batch import PlainRows
from troupellm.models.sampling.row_options import RowOptions
from troupellm.models.sampling.sampler import Sampler
from troupellm.models.sampling.sampling_batch import SamplingBatch
from troupellm.protocol.messages.worker import RowError, SamplingState
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code

CPU = torch.device("cpu")
PROMPT = [3, 8, 20, 20, 31]
GENERATED = [8, 9, 8, 8]
TOKENS = PROMPT + GENERATED


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _who_samples(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cpu, "compiled", lambda: None)
    else:
        needs_compiled_code()
        assert cpu.compiled() is not None


def make_sampler(*states, vocab=VOCAB, prompt=PROMPT):
    sampler = Sampler(vocab, CPU)
    for row, state in enumerate(states):
        sampler.add_row(row, state, prompt, len(prompt))
    return sampler


def sample(sampler, logits, rows=None, tokens=TOKENS):
    rows = list(range(len(logits))) if rows is None else rows
    return sampler.sample(logits.clone(), rows, [len(tokens)] * len(rows), [torch.tensor(tokens)] * len(rows))


def sample_one(state, logits, tokens=TOKENS, prompt=PROMPT):
    found = sample(make_sampler(state, vocab=len(logits), prompt=prompt), logits[None], tokens=tokens)
    return int(found.tokens[0])


def replaced(state, **changes):
    return type(state)(**{field: getattr(state, field) for field in state.__struct_fields__} | changes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_option_draws_what_the_reference_draws(case):
    rows = 24
    logits = make_logits(rows, VOCAB, case.spread, seed=7)
    states = [replaced(case.state, seed=2**64 - 1 - i, fork=i % 3) for i in range(rows)]
    tokens = sample(make_sampler(*states), logits).tokens.tolist()
    for i, state in enumerate(states):
        probabilities = reference.distribution(logits[i], state, TOKENS, len(PROMPT))
        assert tokens[i] == reference.draw(probabilities, state.seed, state.fork, len(TOKENS))


def random_state(rng):
    case = rng.choice(CASES)
    return replaced(case.state, seed=rng.getrandbits(64), fork=rng.randrange(3), logprobs=rng.choice([-1, -1, 0, 2, 7]))


@pytest.mark.parametrize("seed", range(4))
def test_a_row_is_the_same_alone_and_in_any_crowd(seed):
    """Rows join and leave, numbers are reused, prompts and lengths differ: tokens and log-probabilities stay."""
    rng = random.Random(seed)
    sampler = Sampler(VOCAB, CPU)
    crowd = {}
    for step in range(25):
        for row in [row for row in crowd if rng.random() < 0.3]:
            sampler.drop_row(row)
            del crowd[row]
        for row in rng.sample(range(12), 4):
            if row not in crowd:
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
                crowd[row] = (random_state(rng), prompt, list(prompt))
                sampler.add_row(row, crowd[row][0], torch.tensor(prompt, dtype=torch.int32), len(prompt))
        rows = rng.sample(sorted(crowd), rng.randrange(1, len(crowd) + 1))
        logits = make_logits(len(rows), VOCAB, rng.choice([0.5, 2.0, 4.0]), seed=1000 * seed + step)
        histories = [torch.tensor(crowd[row][2], dtype=torch.int32) for row in rows]
        positions = [len(history) for history in histories]
        together = sampler.sample(logits.clone(), rows, positions, histories)
        described = {logprobs.row: logprobs for logprobs in together.logprobs}
        assert together.errors == []
        for i, row in enumerate(rows):
            state, prompt, tokens = crowd[row]
            fresh = Sampler(VOCAB, CPU)
            fresh.add_row(row, state, prompt, len(prompt))
            alone = fresh.sample(logits[i : i + 1].clone(), [row], positions[i : i + 1], histories[i : i + 1])
            assert int(alone.tokens[0]) == int(together.tokens[i])
            assert alone.logprobs == ([described[row]] if row in described else [])
            tokens.append(int(together.tokens[i]))


def test_a_known_set_of_rows_draws_anew_at_every_position():
    sampler = make_sampler(SamplingState(seed=5))
    logits = torch.zeros(1, VOCAB)
    drawn = [int(sampler.sample(logits.clone(), [0], [p], [torch.tensor(TOKENS)]).tokens[0]) for p in range(9, 59)]
    again = [int(sampler.sample(logits.clone(), [0], [p], [torch.tensor(TOKENS)]).tokens[0]) for p in range(9, 59)]
    assert drawn == again
    assert len(set(drawn)) > 40


@pytest.mark.parametrize("seed", range(4))
def test_plain_rows_are_gathered_as_they_would_be_built(seed):
    """Rows join, change and leave, and some stand in a step twice: the same numbers, bit for bit."""
    rng = random.Random(seed)
    plain, known = PlainRows(), {}
    for _ in range(150):
        row = rng.randrange(40)
        if row in known and rng.random() < 0.4:
            plain.drop(row)
            del known[row]
            continue
        state = SamplingState(
            temperature=rng.choice([1.0, 0.3, 1.7, 1e-5, 0.0]),
            min_p=rng.choice([0.0, 0.0, 0.0, 0.05, 5e-324]),
            seed=rng.getrandbits(64),
            fork=rng.randrange(3),
        )
        known[row] = RowOptions(state, torch.tensor(PROMPT), VOCAB)
        plain.put(row, known[row])
        rows = tuple(rng.choices(sorted(known), k=rng.randrange(1, 9)))
        built = SamplingBatch([known[row] for row in rows], VOCAB, CPU)
        choice = plain.choice(rows, CPU)
        assert choice is not None
        assert same(choice.greedy, built.greedy)
        if built.random is None:
            assert choice.random is None
            continue
        for name in ("index", "streams", "inverse_temperature", "log_min_p", "plain"):
            assert same(getattr(choice.random, name), getattr(built.random, name)), name
        assert choice.random.groups == built.random.groups == ()


def same(one, other):
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(
    "more", [{"top_p": 0.5}, {"top_k": 5}, {"logprobs": 0}, {"logit_bias": ((3, 5.0),)}, {"presence_penalty": 1.0}]
)
def test_one_row_that_asks_for_more_is_not_gathered(more):
    def options(state):
        return RowOptions(state, torch.tensor(PROMPT), VOCAB)

    plain = PlainRows()
    for row in range(3):
        plain.put(row, options(SamplingState(seed=row)))
    plain.put(1, options(SamplingState(**more)))
    assert plain.choice((0, 1, 2), CPU) is None
    assert plain.choice((0, 2), CPU) is not None
    plain.put(1, options(SamplingState()))
    assert plain.choice((0, 1, 2), CPU) is not None
    plain.put(1, options(SamplingState(**more)))
    plain.drop(1)
    plain.put(1, options(SamplingState(temperature=0.0, top_p=0.5)))
    assert plain.choice((0, 1, 2), CPU) is not None


def test_an_updated_row_follows_its_new_state():
    sampler = make_sampler(SamplingState(temperature=0.0, repetition_penalty=1000.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, [20, 50]] = torch.tensor([9.0, 5.0])
    assert sample(sampler, logits).tokens.tolist() == [50]
    sampler.update_row(0, SamplingState(temperature=0.0))
    assert sample(sampler, logits).tokens.tolist() == [20]
    sampler.update_row(0, SamplingState(temperature=0.0, repetition_penalty=1000.0))
    assert sample(sampler, logits).tokens.tolist() == [50]


def test_an_added_row_replaces_one_of_the_same_number():
    sampler = make_sampler(SamplingState(temperature=0.0, repetition_penalty=1000.0, logit_bias=((4, 99.0),)))
    logits = make_logits(1, VOCAB, 1.0, seed=8)
    sample(sampler, logits)
    sampler.add_row(0, SamplingState(temperature=0.0), [1], 1)
    assert sample(sampler, logits).tokens.tolist() == logits.argmax(-1).tolist()


def test_unknown_rows_are_refused_and_dropping_one_is_fine():
    sampler = make_sampler(SamplingState())
    sampler.drop_row(0)
    sampler.drop_row(0)
    with pytest.raises(KeyError):
        sample(sampler, torch.zeros(1, VOCAB))


@pytest.mark.parametrize("state", [SamplingState(temperature=0.0), SamplingState(), SamplingState(top_p=0.5, top_k=9)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), "all masked"])
def test_a_row_without_usable_logits_fails_alone(state, poison):
    state = replaced(state, logprobs=2)
    logits = make_logits(5, VOCAB, 2.0, seed=9)
    healthy = sample(make_sampler(*[state] * 5), logits)
    if poison == "all masked":
        logits[2] = -torch.inf
    else:
        logits[2, 77] = poison
    found = sample(make_sampler(*[state] * 5), logits)
    assert found.errors == [RowError(2, "the model gave NaN or infinite logits for this sequence")]
    assert found.tokens.tolist() == [-1 if i == 2 else token for i, token in enumerate(healthy.tokens.tolist())]
    assert found.logprobs == [logprobs for logprobs in healthy.logprobs if logprobs.row != 2]


def test_a_row_whose_every_token_is_masked_fails_alone():
    contradiction = SamplingState(allowed_token_ids=(1, 2), min_tokens=50, stop_token_ids=(1, 2))
    sampler = make_sampler(SamplingState(temperature=0.0), contradiction, SamplingState(temperature=0.0))
    logits = make_logits(3, VOCAB, 2.0, seed=10)
    found = sample(sampler, logits)
    assert [error.row for error in found.errors] == [1]
    assert "allowed_token_ids" in found.errors[0].message
    assert found.tokens.tolist() == [int(logits[0].argmax()), -1, int(logits[2].argmax())]


def test_masked_logits_of_the_model_are_never_drawn():
    logits = torch.full((40, VOCAB), -torch.inf)
    logits[:, [5, 9]] = torch.tensor([1.0, 0.0])
    for state in (SamplingState(), SamplingState(top_k=50), SamplingState(temperature=100.0, frequency_penalty=1.0)):
        found = sample(make_sampler(*[replaced(state, seed=i) for i in range(40)]), logits)
        assert set(found.tokens.tolist()) == {5, 9}


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-310, 9.9e-6])
def test_temperatures_too_small_to_divide_by_are_greedy(temperature):
    logits = make_logits(4, VOCAB, 2.0, seed=11)
    found = sample(make_sampler(*[SamplingState(temperature=temperature, top_p=0.5)] * 4), logits)
    assert found.tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("state", [SamplingState(temperature=1e-5), SamplingState(repetition_penalty=1e-320)])
def test_extreme_numbers_do_not_overflow(state):
    logits = make_logits(4, VOCAB, 1e30, seed=12)
    logits[1, 3:] = -torch.inf
    found = sample(make_sampler(*[state] * 4), logits)
    assert found.errors == []
    assert bool(logits.gather(1, found.tokens[:, None]).isfinite().all())


def test_bad_words_look_at_generated_tokens_only():
    logits = torch.zeros(VOCAB)
    logits[[10, 11]] = torch.tensor([5.0, 4.0])
    state = SamplingState(temperature=0.0, bad_words=((7, 10), (6, 7, 10)))
    assert sample_one(state, logits, tokens=[1, 7, 5], prompt=[1]) == 10
    assert sample_one(state, logits, tokens=[1, 5, 7], prompt=[1]) == 11
    assert sample_one(state, logits, tokens=[1, 5, 7], prompt=[1, 5, 7]) == 10
    longer = replaced(state, bad_words=((6, 7, 10),))
    assert sample_one(longer, logits, tokens=[1, 6, 7], prompt=[1]) == 11
    assert sample_one(longer, logits, tokens=[1, 6, 7], prompt=[1, 6]) == 10


def test_min_tokens_hold_back_the_stop_tokens_for_so_long():
    logits = torch.zeros(VOCAB)
    logits[[2, 9]] = torch.tensor([5.0, 4.0])
    state = SamplingState(temperature=0.0, min_tokens=3, stop_token_ids=(2,))
    chosen = [sample_one(state, logits, tokens=PROMPT + [9] * count) for count in range(5)]
    assert chosen == [9, 9, 9, 2, 2]


def test_ids_beyond_the_logits_touch_no_other_row():
    state = SamplingState(
        temperature=0.0,
        logit_bias=((VOCAB + 3, 100.0),),
        bad_words=((VOCAB + 4,), (8, VOCAB + 5)),
        stop_token_ids=(VOCAB + 6,),
        min_tokens=50,
        repetition_penalty=5.0,
    )
    logits = make_logits(2, VOCAB, 1.0, seed=13)
    logits[1, :8] = torch.arange(20.0, 28.0)
    for tokens in ([*TOKENS, VOCAB + 7], [*TOKENS, -1]):
        found = sample(make_sampler(state, SamplingState(temperature=0.0)), logits, tokens=tokens)
        assert int(found.tokens[1]) == 7


def test_logits_in_half_precision_give_the_likeliest_token():
    logits = make_logits(3, VOCAB, 2.0, seed=14).bfloat16()
    found = sample(make_sampler(*[SamplingState(temperature=0.0)] * 3), logits)
    assert found.tokens.tolist() == logits.float().argmax(-1).tolist()


def test_logprobs_are_raw_and_describe_each_row_by_itself():
    logits = make_logits(4, VOCAB, 2.0, seed=15)
    states = [
        SamplingState(temperature=0.3, logit_bias=((5, 50.0),), logprobs=3),
        SamplingState(temperature=0.0),
        SamplingState(temperature=0.0, logprobs=0),
        SamplingState(temperature=0.0, logprobs=3),
    ]
    found = sample(make_sampler(*states), logits)
    full = logits.double().log_softmax(-1)
    parts = {part.row: part for part in found.logprobs}
    assert sorted(parts) == [0, 2, 3]
    assert [parts[row].width for row in (0, 2, 3)] == [4, 1, 4]
    for row, part in parts.items():
        ids = np.frombuffer(part.token_ids, dtype="<i4")
        assert part.position == len(TOKENS)
        assert int(ids[0]) == int(found.tokens[row])
        assert ids[1:].tolist() == full[row].topk(part.width - 1).indices.tolist()
        np.testing.assert_allclose(np.frombuffer(part.logprobs, dtype="<f4"), full[row][torch.tensor(ids)], atol=1e-5)
        (rank,) = np.frombuffer(part.ranks, dtype="<i4")
        assert rank == 1 + int((full[row] > full[row, int(ids[0])]).sum())
    assert int(np.frombuffer(parts[0].token_ids, dtype="<i4")[0]) == 5


def test_prompt_logprobs_are_those_of_the_softmax():
    logits = make_logits(3, VOCAB, 2.0, seed=16)
    found = prompt_logprobs(logits.clone(), 9, 1, [4, 5, 6], 2)
    full = logits.double().log_softmax(-1)
    assert (found.row, found.position, found.width) == (9, 1, 3)
    ids = np.frombuffer(found.token_ids, dtype="<i4").reshape(3, 3)
    assert ids[:, 0].tolist() == [4, 5, 6]
    assert ids[:, 1:].tolist() == full.topk(2, -1).indices.tolist()
    values = np.frombuffer(found.logprobs, dtype="<f4").reshape(3, 3)
    np.testing.assert_allclose(values, full.gather(1, torch.tensor(ids).long()), atol=1e-5)
    assert len(np.frombuffer(found.ranks, dtype="<i4")) == 3
