"""Fills the masks of a step's guided rows, also at the places behind their draft tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from weakref import ReferenceType, ref

import numpy as np
import torch

from troupellm.models.batch.row_drafts import RowDrafts
from troupellm.models.sampling.masks import TokenMasks
from troupellm.models.structured_outputs.backend import MASK_SECONDS, Masks
from troupellm.models.structured_outputs.backends import BITS
from troupellm.models.structured_outputs.guided_row import FilledAhead, GuidedRow
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.protocol.messages.worker import RowError


class Reasons(Mapping[int, RowError]):
    """Errors for guided rows without an allowed token, by index among the step's sampled rows. Made only on access."""

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
        self,
        index: Sequence[int],
        numbers: Sequence[int],
        rows: Sequence[GuidedRow],
        drafts: Mapping[int, RowDrafts],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """
        Args:
            index: places among the step's sampled rows, rising; a row with drafts has one for itself and one for each
                of them.
            numbers: the rows' own.
            drafts: by the place in `rows` of a row's first entry.
            clock: seconds, on the thread that fills, by which this is timed.
        """
        self._index = index
        self._numbers = numbers
        self._rows = rows
        self._drafts = drafts
        self._clock = clock
        self._masks: Masks = np.empty((0, 0), dtype=np.int32)
        self._done: Future[None] | None = None
        self.seconds = 0.0

    def start(self, library: GuideLibrary, helper: ThreadPoolExecutor | None) -> None:
        """Fill on the helper thread, after its earlier work; without a helper, now."""
        if helper is None:
            self._fill(library)
        else:
            self._done = helper.submit(self._fill, library)

    def wait(self) -> TokenMasks:
        if self._done is not None:
            self._done.result()
        return TokenMasks(
            index=torch.from_numpy(np.fromiter(self._index, np.int64, len(self._index))),
            bits=torch.from_numpy(self._masks),
            reasons=Reasons(self._index, self._numbers, self._rows),
        )

    def _fill(self, library: GuideLibrary) -> None:
        for row in self._rows:
            if row.building is not None:
                row.wait()
        begin = self._clock()
        self._masks = np.full((len(self._rows), library.mask_words), -1, dtype=np.int32)
        places: Iterable[int] = range(len(self._rows))
        if self._drafts:
            followed = {first + node for first, drafts in self._drafts.items() for node in range(len(drafts) + 1)}
            places = [place for place in places if place not in followed]
        self._fill_rows(library, places)
        for first, drafts in self._drafts.items():
            self._fill_drafts(library, first, drafts)
        self.seconds = self._clock() - begin

    def _fill_rows(self, library: GuideLibrary, places: Iterable[int], *, drafts: bool = False) -> None:
        """drafts: the rows are behind drafts; see `_judge`."""
        awake: dict[str, list[int]] = {}
        sure: list[tuple[int, int]] = []
        ready: defaultdict[FilledAhead, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        rows = self._rows
        for place in places:
            row = rows[place]
            if row.error is not None:
                self._masks[place] = 0
            elif row.ahead is not None:  # so it is awake and not complete
                filled, number = row.ahead
                here, there = ready[filled]
                here.append(place)
                there.append(number)
            elif row.sleep is not None and not row.sleep.awake:
                self._masks[place] = row.sleep.mask
            elif row.stopped:  # any token drawn for a complete one is dropped
                continue
            elif row.only is not None:
                sure.append((place, row.only))
            elif row.backend in awake:
                awake[row.backend].append(place)
            else:
                awake[row.backend] = [place]
        if sure:
            at, tokens = np.array(sure).T
            self._masks[at] = 0
            self._masks.view(np.uint32)[at, tokens // BITS] = np.left_shift(1, tokens % BITS).astype(np.uint32)
        for filled, (here, there) in ready.items():
            self._masks[here] = filled.masks[there]
            self._judge(library, here, [filled.seconds[at] for at in there] if filled.seconds else ())
        for name, here in awake.items():
            self._fill_awake(library, name, here, drafts=drafts)

    def _fill_drafts(self, library: GuideLibrary, first: int, drafts: RowDrafts) -> None:
        """Fill the masks at the row's place `first` and behind each of its drafts; the matcher ends where it began."""
        self._fill_rows(library, [first])
        row = self._rows[first]
        walk = Walk(row)
        for node in range(len(drafts)):
            if walk.to(drafts, node):
                self._fill_rows(library, [first + 1 + node], drafts=True)
            else:
                self._masks[first + 1 + node] = 0
        walk.back()

    def _fill_awake(self, library: GuideLibrary, name: str, places: Sequence[int], *, drafts: bool) -> None:
        """name: of the rows' backend."""
        whole = len(places) == len(self._rows)
        masks = self._masks if whole else np.empty((len(places), self._masks.shape[1]), dtype=np.int32)
        seconds = _computed(library, name, [self._rows[place] for place in places], masks)
        if not whole:
            self._masks[places] = masks
        self._judge(library, places, seconds, drafts=drafts)

    def _judge(
        self, library: GuideLibrary, places: Sequence[int], seconds: Sequence[float], *, drafts: bool = False
    ) -> None:
        """Let rows pay for the masks that they have got, and end those whose matchers broke.

        Args:
            seconds: as `Backend.fill` returns them.
            drafts: what goes wrong here has not happened yet. Where the drafts are kept it does a step later.
        """
        rows = self._rows
        for number, place in enumerate(places):
            row = rows[place]
            broken = row.matcher is not None and row.matcher.error is not None
            if drafts:
                if seconds:
                    row.charge_draft(seconds[number])
                if broken:
                    self._masks[place] = 0
                continue
            owes = row.debt > 0.0 or (bool(seconds) and seconds[number] > MASK_SECONDS)
            if owes:
                row.charge(seconds[number] if seconds else 0.0)
            if (broken or owes) and not row.check():
                self._masks[place] = 0


def fill_ahead(library: GuideLibrary, rows: Sequence[GuidedRow]) -> list[ReferenceType[FilledAhead]]:
    """Compute the next masks of rows that want one, before it is known which step will use them.

    Returns:
        the masks, to which only the rows keep references.
    """
    groups: dict[str, list[GuidedRow]] = {}
    for row in rows:
        groups.setdefault(row.backend, []).append(row)
    every = []
    for name, group in groups.items():
        masks = np.empty((len(group), library.mask_words), dtype=np.int32)
        filled = FilledAhead(masks, _computed(library, name, group, masks))
        for place, row in enumerate(group):
            row.ahead = filled, place
        every.append(ref(filled))
    return every


def _computed(library: GuideLibrary, name: str, rows: Sequence[GuidedRow], masks: Masks) -> Sequence[float]:
    """Write the masks of rows that are awake. Returns the result of `Backend.fill`."""
    return library.backend(name).fill([matcher for row in rows if (matcher := row.matcher) is not None], masks)


class Walk:
    """Moves one row's matcher along its drafts, and back."""

    def __init__(self, row: GuidedRow) -> None:
        self._row = row
        self._path: list[int] = []

    def to(self, drafts: RowDrafts, node: int) -> bool:
        """Move the matcher from its last draft to another one; False if the grammar does not allow it there."""
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
