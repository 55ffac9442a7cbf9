"""The packages that some tests need beside the common environment: clients, an encoder, a second backend of guides,
torchao.

Without it they are skipped, which is easy to miss in a green run. Where TROUPE_NEED_ALL is set, as
`make test-all` does, they fail instead.
"""

import os
from importlib.util import find_spec
from typing import NoReturn

import pytest

VARIABLE = "TROUPE_NEED_ALL"


def absent(what: str, how: str) -> NoReturn:
    """End the test that needs `what`; `how` tells where it comes from."""
    if os.environ.get(VARIABLE):
        pytest.fail(f"{what} is not there: {how}, and `make test-all ALLOW_ABSENT=1` does without", pytrace=False)
    pytest.skip(f"{what} is not there: {how}")


def need_xgrammar() -> None:
    """End the test where the second backend of guides is not installed."""
    if find_spec("xgrammar") is None:
        absent("xgrammar, the library of a plug-in,", "`make xgrammar` installs it")
