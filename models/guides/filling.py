"""Filling the masks of a step's guided rows, where drafts are behind them too."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from troupellm.models.guides.backend import Backend, Masks
from troupellm.models.guides.backends import BITS
from troupellm.models.guides.guided_row import GuidedRow
from troupellm.models.guides.library import GuideLibrary
from troupellm.models.guides.masks import TokenMasks
from troupellm.models.speculation.drafts import RowDrafts
from troupellm.protocol.worker import RowError


class Reasons(Mapping[int, RowError]):
    """What to say if guided rows find no token, by their places among the step's sampled rows. Few are asked."""

    def __init__(self, index: Sequence[int], numbers: Sequence[int], rows: Sequence[GuidedRow]) -> None:
        self._index, self._numbers, self._rows = index, numbers, rows

    def __getitem__(self, place: int) -> RowError:
        try:
            at = self._index.index(place)
        except ValueError:
            raise KeyError(place) from None
        return self._rows[at].failure(self._numbers[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


class FilledLater:
    """Masks that are being filled."""

    def __init__(
        self, index: Sequence[int], numbers: Sequence[int], rows: Sequence[GuidedRow],
        drafts: Mapping[int, RowDrafts],
    ) -> None:  # fmt: skip
        """
        Args:
            index: places among the step's sampled rows; a row with drafts has one for itself and one for each of them.
            numbers: the rows' own.
            drafts: by the place in `rows` of a row's first entry.
        """
        self._index = index
        self._numbers = numbers
        self._rows = rows
        self._drafts = drafts
        self._masks: NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)
        self._forbidden: NDArray[np.uint8] | None = None
        self._done: Future[None] | None = None
        self.seconds = 0.0

    def start(self, library: GuideLibrary, helper: ThreadPoolExecutor | None) -> None:
        """Fill on the helper, behind what it does already; without one, now."""
        if helper is None:
            self._fill(library)
        else:
            self._done = helper.submit(self._fill, library)

    def wait(self) -> TokenMasks:
        if self._done is not None:
            self._done.result()
        assert self._forbidden is not None
        return TokenMasks(
            index=torch.tensor(self._index, dtype=torch.int64),
            forbidden=torch.from_numpy(self._forbidden).view(torch.bool),
            bits=torch.from_numpy(self._masks),
            reasons=Reasons(self._index, self._numbers, self._rows),
        )

    def _fill(self, library: GuideLibrary) -> None:
        for row in self._rows:
            row.wait()
        begin = perf_counter()
        self._masks = np.full((len(self._rows), library.mask_words), -1, dtype=np.int32)
        followed = {first + node for first, drafts in self._drafts.items() for node in range(len(drafts) + 1)}
        self._fill_rows(library, [place for place in range(len(self._rows)) if place not in followed])
        for first, drafts in self._drafts.items():
            self._fill_drafts(library, first, drafts)
        vocab = library.vocab_width
        self._forbidden = np.unpackbits(~self._masks.view(np.uint8), axis=1, count=vocab, bitorder="little")
        self.seconds = perf_counter() - begin

    def _fill_rows(self, library: GuideLibrary, places: Iterable[int], *, drafts: bool = False) -> None:
        """drafts: the rows are behind drafts; see `_fill_awake`."""
        awake: dict[str, list[int]] = {}
        sure: list[tuple[int, int]] = []
        for place in places:
            row = self._rows[place]
            if row.error is not None:
                self._masks[place] = 0
            elif row.asleep:
                assert row.sleep is not None
                self._masks[place] = row.sleep.mask
            elif row.stopped:  # whatever a complete one draws is dropped
                continue
            elif row.only is not None:
                sure.append((place, row.only))
            else:
                awake.setdefault(row.backend, []).append(place)
        if sure:
            at, tokens = np.array(sure).T
            self._masks[at] = 0
            self._masks.view(np.uint32)[at, tokens // BITS] = np.left_shift(1, tokens % BITS).astype(np.uint32)
        for name, places in awake.items():
            self._fill_awake(library.backend(name), places, drafts=drafts)

    def _fill_drafts(self, library: GuideLibrary, first: int, drafts: RowDrafts) -> None:
        """What may come at the row's place `first`, and behind each of its drafts; it is where it was at the end."""
        self._fill_rows(library, [first])
        row = self._rows[first]
        walk = Walk(row)
        for node in range(len(drafts)):
            if walk.to(drafts, node):
                self._fill_rows(library, [first + 1 + node], drafts=True)
            else:
                self._masks[first + 1 + node] = 0
        walk.back()

    def _fill_awake(self, backend: Backend, places: list[int], *, drafts: bool) -> None:
        """drafts: what goes wrong here has not happened yet. Where the drafts are kept it does a step later."""
        rows = [self._rows[place] for place in places]
        whole = len(places) == len(self._rows)
        masks = self._masks if whole else np.empty((len(places), self._masks.shape[1]), dtype=np.int32)
        seconds = _computed(backend, rows, masks)
        for number, row in enumerate(rows):
            taken, broken = seconds[number], row.matcher is not None and row.matcher.error is not None
            if drafts:
                if taken is not None:
                    row.charge_draft(taken)
                if broken:
                    masks[number] = 0
                continue
            if taken is not None:
                row.charge(taken)
            if broken and row.retry() and row.matcher is not None:
                backend.fill([row.matcher], masks[number : number + 1])
            if (broken or taken is not None) and not row.check():
                masks[number] = 0
        if not whole:
            self._masks[places] = masks


def fill_ahead(library: GuideLibrary, rows: Sequence[GuidedRow]) -> None:
    """Compute the next masks of rows that want one, before it is known which step they will stand in."""
    groups: dict[str, list[GuidedRow]] = {}
    for row in rows:
        groups.setdefault(row.backend, []).append(row)
    for name, group in groups.items():
        masks = np.empty((len(group), library.mask_words), dtype=np.int32)
        seconds = _computed(library.backend(name), group, masks)
        for number, row in enumerate(group):
            row.ahead = masks[number], seconds[number]


def _computed(backend: Backend, rows: Sequence[GuidedRow], masks: Masks) -> list[float | None]:
    """Write the masks of rows that are awake, of which some may have been filled ahead.

    Returns:
        CPU seconds of each, where they were taken.
    """
    seconds: list[float | None] = [None] * len(rows)
    left = []
    for number, row in enumerate(rows):
        if row.ahead is None:
            left.append(number)
        else:
            masks[number], seconds[number] = row.ahead
    if not left:
        return seconds
    matchers = [matcher for number in left if (matcher := rows[number].matcher) is not None]
    part = masks if len(left) == len(rows) else np.empty((len(left), masks.shape[1]), dtype=np.int32)
    taken = backend.fill(matchers, part)
    for number, each in zip(left, taken, strict=False):  # empty where they were not taken
        seconds[number] = each
    if part is not masks:
        masks[left] = part
    return seconds


class Walk:
    """One row follows drafts, and comes back."""

    def __init__(self, row: GuidedRow) -> None:
        self._row = row
        self._path: list[int] = []

    def to(self, drafts: RowDrafts, node: int) -> bool:
        """From the last draft that it went to, to another one; False where its grammar does not go on there."""
        way = drafts.ancestors(node)
        common = 0
        while common < min(len(way), len(self._path)) and way[common] == self._path[common]:
            common += 1
        self._return(len(self._path) - common)
        for step in way[common:]:
            if not self._row.follow(drafts.tokens[step]):
                return False
            self._path.append(step)
        return True

    def back(self) -> None:
        self._return(len(self._path))

    def _return(self, count: int) -> None:
        if count:
            self._row.return_to(count)
            del self._path[-count:]
