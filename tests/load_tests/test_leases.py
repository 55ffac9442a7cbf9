"""What KV leases are worth to an agent's session, and what they cost the others: `bench leases` on short sessions."""

from troupellm.load_tests.leases.command import compare
from troupellm.load_tests.leases.fleet import Shape


def test_an_agents_session_stays_cached_among_fifty_and_the_others_hardly_notice() -> None:
    lines = compare(Shape(beginning=176, asked=6, answered=2))
    assert not [(text, value, bar) for text, value, bar, kept in lines if not kept]
