"""Tells the text in which stop strings count from that in which they do not, as it arrives."""

from collections.abc import Sequence

from troupellm.models.dialects.marks import MOST_SPACES, Marks
from troupellm.protocol.sampling_extras import StopRegion


class StopRegions:
    """The marks of a request; immutable, shared by its sequences."""

    def __init__(self, regions: Sequence[StopRegion], inside: Sequence[str] | None) -> None:
        """
        Args:
            inside: marks that end the part in which the text begins; None: it begins where stop strings count.
        """
        self.by_mark = {region.opens: (region.firsts, Marks(region.closes)) for region in regions}
        self.opens = Marks(self.by_mark)
        self.inside = None if inside is None else Marks(inside)


class RegionText:
    """Follows the text of one sequence. No more of it is held than may become a mark."""

    __slots__ = ("_ends", "_held", "_regions")

    def __init__(self, regions: StopRegions) -> None:
        self._regions = regions
        self._ends = regions.inside
        """Marks that end the part that the text is in; None where stop strings count."""
        self._held = ""

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Parts of the text, each with whether stop strings count in it."""
        text, self._held = self._held + text, ""
        parts: list[tuple[str, bool]] = []
        position = 0
        while position < len(text):
            ends = self._ends
            marks = self._regions.opens if ends is None else ends
            found = marks.find(text, position)
            if found is None:
                edge = marks.partial(text, position)
                parts.append((text[position:edge], ends is None))
                self._held = text[edge:]
                break
            if ends is not None:
                parts.append((text[position : found.end()], False))
                position, self._ends = found.end(), None
                continue
            parts.append((text[position : found.start()], True))
            firsts, closes = self._regions.by_mark[found[0]]
            following = text[found.end() : found.end() + MOST_SPACES].lstrip()[:1] if firsts else ""
            if firsts and not following and len(text) - found.end() < MOST_SPACES:
                self._held = text[found.start() :]
                break
            counts = bool(firsts) and (not following or following not in firsts)
            parts.append((found[0], counts))
            position, self._ends = found.end(), None if counts else closes
        return [part for part in parts if part[0]]

    def rest(self) -> list[tuple[str, bool]]:
        """What is held at the end of the text."""
        held, self._held = self._held, ""
        return [(held, self._ends is None)] if held else []
