"""The simulator bites: each deliberate mistake is found."""

import pytest
from mutations import MOST_SEEDS, MUTATIONS, changed_source, search


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fits_the_source(name: str) -> None:
    mutation = MUTATIONS[name]
    compile(changed_source(mutation), mutation.module, "exec")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_mutation_is_found() -> None:
    assert len(MUTATIONS) >= 10
    missed = [name for name, failure in search(list(MUTATIONS), jobs=2).items() if failure is None]
    assert not missed, f"not found within {MOST_SEEDS} seeds: {missed}"
