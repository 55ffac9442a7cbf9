"""Tells the text in which stop strings count from that in which they do not, as it arrives."""

import re
from collections.abc import Sequence

from troupellm.models.chat_parsers.until_marker import MOST_SPACES, Marks
from troupellm.protocol.params.sampling_checks import StopRegion

_MOST_HEADER = 2048
"""Characters of a message's header that are looked at."""
_PART_OF_NAME = re.compile(r"[A-Za-z0-9_.-]")


class _Region:
    """A region, ready to be looked for."""

    def __init__(self, region: StopRegion, opens: frozenset[str]) -> None:
        """opens: all marks that begin regions anywhere."""
        self.opens = region.opens
        self.closes = Marks(region.closes)
        self.header = region.header
        self.header_ends = Marks({region.header, *region.closes} - opens) if region.header else None
        """A mark that begins a header may stand within one, too."""
        self.silent = re.compile(region.silent, re.DOTALL)
        self._firsts = region.firsts
        self._names = region.names
        self._window = MOST_SPACES + max(map(len, region.names), default=0) + 2

    def follows(self, text: str, position: int) -> bool | None:
        """Whether what stands behind the opening mark belongs to the region; None where more text decides."""
        if not self._firsts and not self._names:
            return True
        window = text[position : position + self._window]
        body = window.lstrip()
        spaces = len(window) - len(body)
        if spaces >= MOST_SPACES:
            return False
        if not body:
            return None
        if body[0] in self._firsts:
            return True
        if body[0] in "\"'":
            body = body[1:]
        behind = [body[len(name) : len(name) + 1] for name in self._names if body.startswith(name)]
        if any(character and not _PART_OF_NAME.match(character) for character in behind):
            return True
        undecided = any(name.startswith(body) for name in self._names)
        return None if undecided else False


class StopRegions:
    """The marks of a request; immutable, shared by its sequences."""

    def __init__(self, regions: Sequence[StopRegion], inside: Sequence[str] | None) -> None:
        """
        Args:
            inside: marks that end the part in which the text begins; None: it begins where stop strings count.
        """
        opens = frozenset(region.opens for region in regions if region.at == "any")
        made = [(region.at, _Region(region, opens)) for region in regions]
        self.by_mark = {region.opens: region for at, region in made if at == "any"}
        self.opens = Marks(self.by_mark)
        answer = [region for at, region in made if at == "answer"]
        self.first = {"start": [region for at, region in made if at == "start"] + answer, "answer": answer, "": []}
        """Regions that may come next, by stage of the text."""
        self.inside = None if inside is None else Marks(inside)


class RegionText:
    """Follows the text of one sequence. No more of it is held than may become a mark, or tells what a mark means."""

    __slots__ = ("_ends", "_header", "_held", "_regions", "_said", "_stage")

    def __init__(self, regions: StopRegions) -> None:
        self._regions = regions
        self._ends = regions.inside
        """Marks that end the part that the text is in; None where stop strings count."""
        self._stage = "start" if regions.inside is None else "answer"
        """start: nothing but white space has come. answer: nothing but reasoning has. "": anything else."""
        self._header: _Region | None = None
        """Of the message whose header is being read."""
        self._said = ""
        """The header so far."""
        self._held = ""

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Parts of the text, each with whether stop strings count in it."""
        text, self._held = self._held + text, ""
        parts: list[tuple[str, bool]] = []
        position = 0
        while position < len(text):
            if self._ends is not None:
                position = self._inside(text, position, self._ends, parts)
            elif self._regions.first[self._stage]:
                position = self._first(text, position, parts)
            else:
                position = self._outside(text, position, parts)
        return [part for part in parts if part[0]]

    def rest(self) -> list[tuple[str, bool]]:
        """The held part at the end of the text."""
        held, self._held = self._held, ""
        return [(held, self._ends is None)] if held else []

    def _inside(self, text: str, position: int, ends: Marks, parts: list[tuple[str, bool]]) -> int:
        found = ends.find(text, position)
        edge = ends.partial(text, position) if found is None else found.start()
        header, mark = self._header, "" if found is None else found[0]
        if header is not None:
            self._said = (self._said + text[position:edge])[:_MOST_HEADER]
        if found is None:
            self._held = text[edge:]
            parts.append((text[position:edge], False))
            return len(text)
        self._header = self._ends = None
        if header is not None and mark == header.header and header.silent.search(self._said):
            self._ends = header.closes
        end = edge if mark in self._regions.by_mark else found.end()  # a mark that begins another part is read again
        parts.append((text[position:end], False))
        return end

    def _first(self, text: str, position: int, parts: list[tuple[str, bool]]) -> int:
        """Before anything but white space and reasoning has come."""
        body = len(text) - len(text[position:].lstrip())
        if body > position:
            parts.append((text[position:body], True))
            return body
        regions = self._regions.first[self._stage]
        for region in regions:
            if text.startswith(region.opens, position):
                self._stage = "answer" if self._stage == "start" else ""
                return self._enter(region, position, parts)
        if any(
            len(region.opens) > len(text) - position and region.opens.startswith(text[position:]) for region in regions
        ):
            self._held = text[position:]
            return len(text)
        self._stage = ""
        return position

    def _outside(self, text: str, position: int, parts: list[tuple[str, bool]]) -> int:
        found = self._regions.opens.find(text, position)
        edge = self._regions.opens.partial(text, position) if found is None else found.start()
        parts.append((text[position:edge], True))
        if found is None:
            self._held = text[edge:]
            return len(text)
        region = self._regions.by_mark[found[0]]
        follows = region.follows(text, found.end())
        if follows is None:
            self._held = text[edge:]
            return len(text)
        self._stage = ""
        if follows:
            return self._enter(region, edge, parts)
        parts.append((found[0], True))
        return found.end()

    def _enter(self, region: _Region, position: int, parts: list[tuple[str, bool]]) -> int:
        parts.append((region.opens, False))
        self._ends = region.closes
        if region.header_ends is not None:
            self._ends, self._header, self._said = region.header_ends, region, region.opens
        return position + len(region.opens)
