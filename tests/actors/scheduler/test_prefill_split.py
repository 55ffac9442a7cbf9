"""How the prompt tokens of a step are dealt out among tenants: in equal parts, and in turns where there are too few."""

from collections import Counter

import pytest
from oracle import Harness, beam_submission, make_core, ready, submission


def test_half_of_the_prompt_tokens_are_kept_for_who_was_served_less() -> None:
    made = ready(num_blocks=400, max_model_len=400)
    harness = Harness(make_core(made, max_num_prefill_tokens=8), made)
    harness.submit(submission(1, [1] * 300, tenant="loud"))
    harness.step()
    harness.submit(submission(2, [2] * 4, tenant="quiet"))
    harness.step()
    plan = harness.plans[-1]
    assert dict(zip(plan.rows, plan.counts, strict=True)) == {100: 4, 200: 4}


def test_fewer_prompt_tokens_than_tenants_are_taken_in_turns() -> None:
    """Waiting requests take turns too: a newcomer need not wait for the others' whole prompts."""
    made = ready(num_blocks=400, max_model_len=400)
    harness = Harness(make_core(made, max_num_prefill_tokens=1), made)
    harness.submit(submission(1, [1] * 100, tenant="long"))
    for _ in range(4):
        harness.step()
    harness.submit(submission(2, [2] * 40, tenant="short"))
    for _ in range(40):
        harness.step()
    harness.submit(submission(3, [3] * 30, tenant="late"))
    for _ in range(30):
        harness.step()
    computed = Counter[int]()
    for plan in harness.plans:
        computed.update(dict(zip(plan.rows, plan.counts, strict=True)))
    assert computed[100] == 4 + 20 + 10
    assert computed[200] == 20 + 10
    assert computed[300] == 10
    harness.run()


@pytest.mark.parametrize(
    ("tokens", "tenants", "length", "plans"), [(2, 2, 1, 2), (1, 1, 3, 1), (1, 1, 2, 1), (16, 20, 1, 2)]
)
def test_floods_of_short_prompts_do_not_keep_a_long_one_from_its_turns(
    tokens: int, tenants: int, length: int, plans: int
) -> None:
    """Prompts of a token, and the last tokens of others, take no turn and none of what is another tenant's."""
    made = ready(num_blocks=2000, max_model_len=400)
    core = make_core(made, max_num_prefill_tokens=tokens, max_num_seqs=tenants + 8, max_plans_in_flight=plans)
    harness = Harness(core, made, checks_every_call=False)
    for step in range(110):
        for tenant in range(tenants):
            harness.submit(submission(100 + tenants * step + tenant, [1] * length, tenant=f"{tenant}", max_tokens=1))
        if step == 6:
            harness.submit(submission(1, [9] * 40, tenant="long", max_tokens=4))
        harness.step()
    assert 1 in harness.reader.closed


@pytest.mark.parametrize("search", [False, True])
def test_single_tokens_go_on_beside_prompts_that_could_take_the_whole_step(search: bool) -> None:
    """The last token of a prompt, and each beam's next one."""
    made = ready(num_blocks=2000, max_model_len=400)
    harness = Harness(make_core(made, max_num_batched_tokens=8, max_num_prefill_tokens=8), made)
    harness.submit(submission(1, [1] * 300, tenant="loud", max_tokens=1))
    harness.step()
    make = beam_submission if search else submission
    harness.submit(make(2, [2] * 9, 2 if search else 1, tenant="quiet", max_tokens=4))
    for _ in range(12):
        harness.step()
    assert 2 in harness.reader.closed
    assert 1 not in harness.reader.closed
    harness.run()


def test_a_tenant_with_two_prompts_under_way_has_one_turn() -> None:
    made = ready(num_blocks=400, max_model_len=400)
    harness = Harness(make_core(made, max_num_prefill_tokens=1), made)
    for request, tenant in enumerate("aab", 1):
        harness.submit(submission(request, [request] * 60, tenant=tenant))
        for _ in range(4):
            harness.step()
    computed = Counter[int]()
    begun = len(harness.plans)
    for _ in range(40):
        harness.step()
    for plan in harness.plans[begun:]:
        computed.update(dict(zip(plan.rows, plan.counts, strict=True)))
    assert computed[100] + computed[200] == computed[300] == 20
    harness.run()


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("length", [4, 5, 6])
def test_a_prompt_goes_on_beside_one_that_loses_its_blocks_again_and_again(length: int, plans: int) -> None:
    """One prompt token per step, and blocks for one and a half of them: who came first has them when it needs them."""
    made = ready(num_blocks=5, block_size=2, max_model_len=12, windows=(5,))
    tokens = {"max_num_batched_tokens": 3, "max_num_prefill_tokens": 1}
    core = make_core(made, caching=False, max_num_seqs=2, max_plans_in_flight=plans, **tokens)
    harness = Harness(core, made)
    harness.submit(submission(1, [1, 2, 3, 4, 5, 6, 7, 8, 2, 2, 2], tenant="", max_tokens=1))
    for _ in range(3):
        harness.step()
    harness.submit(submission(2, [3, 3, 2, 1, 2, 4][:length], tenant="a", max_tokens=5))
    harness.run(200)
    harness.assert_idle()


def test_a_prompt_that_lacks_blocks_keeps_its_turn_until_it_has_them() -> None:
    """Two tenants share steps of one token. The blocks that the newcomer gives up return after the next plan."""
    made = ready(num_blocks=7, block_size=1, max_model_len=9, windows=(None, 2, 6))
    core = make_core(made, max_num_seqs=2, max_num_batched_tokens=1, max_plans_in_flight=2)
    harness = Harness(core, made)
    harness.submit(submission(1, [1, 2, 3, 4, 5, 6], tenant="a", max_tokens=3))
    harness.step()
    harness.submit(submission(2, [7, 8, 9, 7], tenant="b", max_tokens=5))
    harness.run(200)
    harness.assert_idle()
