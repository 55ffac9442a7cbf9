"""The operations that are right on the device, and those that may not be timed."""

from collections.abc import Mapping

import msgspec

from troupellm.load_tests.gpu.checking import LARGEST, Unfinished
from troupellm.load_tests.gpu.goals import GOALS
from troupellm.load_tests.kernels.checks import Check


class Correctness(msgspec.Struct, frozen=True):
    """By operation. An operation in none of these is right."""

    wrong: dict[str, list[str]] = {}
    """Cases whose numbers are not those of the reference."""
    late: list[str] = []
    """Not known: there was no time left."""
    broken: dict[str, str] = {}
    """Not known: what its process died of."""
    worst: dict[str, float] = {}
    """The largest error of all cases, over what is allowed."""

    @classmethod
    def of(cls, found: Mapping[str, list[Check] | Unfinished]) -> "Correctness":
        made = cls({}, [], {}, {})
        for operation, cases in found.items():
            if isinstance(cases, Unfinished):
                if cases.late:
                    made.late.append(operation)
                else:
                    made.broken[operation] = cases.why[:300]
                continue
            made.worst[operation] = min(max((one.error for one in cases), default=0.0), LARGEST)
            if wrong := [f"{one.case}: {one.error:.2g} times" for one in cases if not one.right]:
                made.wrong[operation] = wrong
        return made

    def joined(self, found: Mapping[str, list[Check] | Unfinished]) -> "Correctness":
        """The right operations of these, and what was found of others later."""
        later = Correctness.of(found)
        return msgspec.structs.replace(later, worst={**{name: self.worst[name] for name in self.right}, **later.worst})

    @property
    def right(self) -> list[str]:
        """Operations whose every case has the reference's numbers."""
        return [operation for operation in self.worst if operation not in self.wrong]

    @property
    def whole(self) -> bool:
        """Everything was checked, and is right."""
        return not (self.wrong or self.late or self.broken)

    def objections(self, goal: str) -> str:
        """Why a goal is not to be timed; empty where it may be."""
        return "; ".join(
            f"{operation} {said}" for operation in GOALS[goal].needs if (said := self._objection(operation))
        )

    def _objection(self, operation: str) -> str:
        if operation in self.wrong:
            return f"is wrong ({self.wrong[operation][0]})"
        if operation in self.broken:
            return f"cannot be checked ({self.broken[operation]})"
        return "was not checked in time" if operation in self.late else ""

    def text(self) -> str:
        lines = [f"{operation} is WRONG: {'; '.join(cases)}" for operation, cases in self.wrong.items()]
        lines += [f"{operation} cannot be checked: {why}" for operation, why in self.broken.items()]
        lines += [f"{', '.join(self.late)}: not checked in time"] if self.late else []
        return "\n".join(lines) or "all right"
