"""Guides that are to be built: one of each tenant in turn, and none of them takes all the room."""

from collections import Counter, OrderedDict
from typing import Final

from troupellm.actors.guide.fair_queue import SMALL_BYTES
from troupellm.protocol.messages.guide import BuildGuide
from troupellm.protocol.params.guide import MOST_PROGRAMS, MOST_TEXT_BYTES, EarlyEnd, GuideProgram

MOST_OPEN: Final = MOST_PROGRAMS // 4
"""Programs that are being built, or are built and wait for a sequence to start with them."""
MOST_OPEN_BYTES: Final = MOST_TEXT_BYTES // 4
_FOR_SMALL: Final = MOST_OPEN // 4
"""Places that large programs leave free, with the bytes that small ones need there."""
_MOST_LARGE_BYTES: Final = MOST_OPEN_BYTES - _FOR_SMALL * SMALL_BYTES
_SHARE: Final = 3
"""A tenant has at most so many open programs for each place that it leaves free."""

ProgramKey = tuple[str, str, str, EarlyEnd | None, str]


def program_key(program: GuideProgram) -> ProgramKey:
    return program.backend, program.text, program.after, program.early_end, program.tenant


class BuildQueue:
    """No longer than the waiting sequences are many, and empty where none waits."""

    def __init__(self) -> None:
        self.lines: OrderedDict[str, dict[ProgramKey, GuideProgram]] = OrderedDict()
        """By tenant; the next turn's first. No line is empty."""

    def add(self, tenant: str, program: GuideProgram) -> None:
        """A program that is there already keeps its place."""
        self.lines.setdefault(tenant, {}).setdefault(program_key(program), program)

    def remove(self, tenant: str, key: ProgramKey) -> None:
        """Idempotent."""
        line = self.lines.get(tenant, {})
        line.pop(key, None)
        if not line:
            self.lines.pop(tenant, None)

    def clear(self) -> None:
        self.lines.clear()

    def take(self, occupied: dict[ProgramKey, str]) -> list[BuildGuide]:
        """The next programs, as many as there is room for.

        Args:
            occupied: tenants of the open programs; those that are taken are added.
        """
        asks: list[BuildGuide] = []
        if not self.lines:
            return asks
        counts = Counter(occupied.values())
        num_bytes = sum(len(text) for _, text, _, _, _ in occupied)
        num_large = sum(1 for _, text, _, _, _ in occupied if len(text) > SMALL_BYTES)
        waiting = list(self.lines)
        while waiting:
            still: list[str] = []
            for tenant in waiting:
                key, program = next(iter(self.lines[tenant].items()))
                large = len(program.text) > SMALL_BYTES
                most_bytes = _MOST_LARGE_BYTES if large else MOST_OPEN_BYTES
                fits = not occupied or num_bytes + len(program.text) <= most_bytes
                if large and num_large >= MOST_OPEN - _FOR_SMALL:
                    continue
                if not fits or counts[tenant] >= _SHARE * (MOST_OPEN - len(occupied)):
                    continue
                asks.append(BuildGuide(program, tenant))
                occupied[key] = tenant
                counts[tenant] += 1
                num_bytes += len(program.text)
                num_large += large
                self.lines.move_to_end(tenant)
                self.remove(tenant, key)
                if tenant in self.lines:
                    still.append(tenant)
            waiting = still
        return asks
