"""Faults of protocol/."""

from typing import Final

from troupellm.tests.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "the excluded end of a range is accepted",
        "protocol/params/checks.py",
        " or (exclusive and value == low)",
        "",
        "protocol/params/test_sampling.py",
    ),
    Mutant(
        "true counts as the integer 1",
        "protocol/params/checks.py",
        "isinstance(value, bool) or not isinstance(value, int):",
        "not isinstance(value, int):",
        "protocol/params/test_sampling.py",
    ),
    Mutant(
        "best_of may be smaller than n",
        "protocol/params/sampling.py",
        "self.best_of < self.n:",
        "self.best_of > MAX_N:",
        "protocol/params/test_sampling.py",
    ),
    Mutant(
        "a token id one beyond the logits is accepted",
        "protocol/params/sampling.py",
        "max(ids) >= width:",
        "max(ids) > width:",
        "protocol/params/test_sampling.py",
    ),
    Mutant(
        "log-probabilities of the whole vocabulary pass the limit as minus one",
        "protocol/params/sampling.py",
        "(width if wanted == -1 else wanted) > most",
        "wanted > most",
        "protocol/params/test_sampling.py",
    ),
    Mutant(
        "an empty frame is taken for a message",
        "protocol/wire/frames.py",
        "if not 0 < length <= limit:",
        "if not 0 <= length <= limit:",
        "protocol/wire/test_frames.py",
    ),
    Mutant(
        "a stranger's first frame may be as large as a step",
        "protocol/wire/frames.py",
        "min(self._limit, HELLO_BYTES)",
        "self._limit",
        "protocol/wire/test_frames.py",
    ),
    Mutant(
        "a peer of another version is greeted",
        "protocol/wire/frames.py",
        "if hello.version != self._hello.version:",
        "if not hello.version:",
        "protocol/wire/test_frames.py",
    ),
    Mutant(
        "MB counts binary",
        "protocol/config/sizes.py",
        "(unit.isupper() and not suffix)",
        "unit.isupper()",
        "server/cli/test_flags.py",
    ),
    Mutant(
        "ranges of draft lengths may overlap in one number of rows",
        "protocol/config/speculation.py",
        "if not before < first <= last:",
        "if not before <= first <= last:",
        "protocol/config/test_speculative.py",
    ),
    Mutant(
        "the last number of rows of a range gets the default draft length",
        "protocol/config/speculation.py",
        "if first <= num_rows <= last:",
        "if first <= num_rows < last:",
        "protocol/config/test_speculative.py",
    ),
    Mutant(
        "a connector that loads nothing may be asked to fail a load",
        "protocol/config/kv_connectors.py",
        '== "fail" and not self.consumes:',
        '== "fail" and not self.produces:',
        "protocol/config/test_kv_transfer.py",
    ),
    Mutant(
        "a reply with more tokens than its counts say is taken",
        "actors/scheduler/take_result.py",
        " and sum(counts) == len(result.tokens)",
        "",
        "actors/scheduler/test_updates.py",
    ),
)
