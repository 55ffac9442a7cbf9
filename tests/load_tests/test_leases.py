"""The benefit of KV leases for an agent's session, and their cost for others: `bench leases` on short sessions."""

import pytest

from troupellm.load_tests.bench.leases import compare
from troupellm.load_tests.kv_cache.fleet import WATCHED, Fleet, Shape

SHORT = Shape(beginning=176, asked=6, answered=2)


@pytest.mark.parametrize(("fraction", "least", "most"), [(0.5, 0.95, 1.0), (0.0, 0.0, 0.1)])
def test_a_session_among_fifty_in_a_cache_for_twenty_is_found_where_it_is_leased(
    fraction: float, least: float, most: float
) -> None:
    outcome = Fleet(SHORT, fraction=fraction, hints=frozenset({WATCHED})).run()
    assert least <= outcome.cached <= most


def test_leases_keep_their_bars_and_a_killed_worker_changes_no_answer() -> None:
    lines = compare(Shape(sessions=15, fits=6, turns=10, beginning=400, asked=10, answered=4, at_once=2))
    assert not [(text, value, bar) for text, value, bar, kept in lines if not kept]
