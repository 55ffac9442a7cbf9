"""Numbers of a goal that come one by one: what one of them fails of is not lost to the others."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from troupellm.protocol.errors import TroupeError

Found = tuple[dict[str, float], dict[str, Any]]


class Partly(Exception):
    """Some parts of a goal have no numbers."""

    def __init__(self, found: Found, why: str, *, failed: bool) -> None:
        """failed: one of them broke; else they were refused by name."""
        super().__init__(why)
        self.found, self.why, self.failed = found, why, failed


class Gathered:
    """The findings of a goal's parts so far."""

    def __init__(self) -> None:
        self.found, self.details = dict[str, float](), dict[str, Any]()
        self._missing: list[str] = []
        self._failed = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One part, which may fail alone. Its name is printed, so that the log shows the part that hangs."""
        try:
            yield
            print(f"{name}: {self.found.get(name)}, {self.details.get(name)}", flush=True)
        except TroupeError as error:  # what is not built, or does not fit, refuses by name
            self._missing.append(f"{name}: {error.message}"[:300])
        except Exception as error:
            traceback.print_exc()
            self._failed = True
            self._missing.append(f"{name}: {type(error).__name__}: {error}"[:300])

    def all(self) -> Found:
        """
        Raises:
            Partly: there is more that is missing.
        """
        if self._missing:
            raise Partly((self.found, self.details), "; ".join(self._missing), failed=self._failed)
        return self.found, self.details
