"""Checks that a tokenizer preserves a text: one that is empty, damaged or of another model loses some of it."""

from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import ModelLoadError

SAMPLE = "Letters 0123\n\u65e5\u672c\u8a9e \u00e9 \U0001f389 end"
"""Letters, digits, a newline, CJK, an accent and an emoji, in Unicode's form NFC."""
_WORDS = "letters 0123"


def check_trial(tokenizer: Tokenizer, file: str) -> None:
    """Encode and decode a sample.

    Vocabularies of bytes must keep all of it, others (BERT's, Unigram without bytes) letters and digits.

    Raises:
        ModelLoadError: the tokenizer loses more.
    """
    sample = SAMPLE if tokenizer.form != "other" else _WORDS
    try:
        ids = tokenizer.encode(sample, add_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file}: a sample text cannot be encoded: {error}") from error
    if tokenizer.form == "other":
        kept = _letters(text) == _letters(sample)
    else:
        kept = text.strip().casefold() == sample.casefold()
    if not kept:
        raise ModelLoadError(
            f"{file} is empty or does not fit: {sample!r} comes back as {text[:80]!r}",
            hint="download the tokenizer's files again, or name another folder by --tokenizer",
        )


def _letters(text: str) -> str:
    return "".join(text.casefold().split())
