"""Look-ups of a step in a library of guides, once a guide is built."""

from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.protocol.params.guide import GuideProgram


class Counted:
    """A tokenizer that counts how often it is looked at."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.looks = 0

    def __getattr__(self, name: str) -> object:
        self.looks += 1
        return getattr(self._tokenizer, name)


def test_the_width_of_masks_is_known_when_a_guide_is_built(tokenizer):
    """To find it takes a lock that is held for seconds while another backend is made."""
    counted = Counted(tokenizer)
    library = GuideLibrary(lambda: counted, tokenizer.size, 1)
    library.matcher(GuideProgram(backend="llguidance", text='start: "a"'))
    before = counted.looks
    assert library.mask_words == GuideLibrary(lambda: tokenizer, tokenizer.size, 1).mask_words
    assert counted.looks == before


def test_tenants_share_no_built_guide(tokenizer):
    """The speed of a shared one would tell a tenant what another one has asked for."""
    library = GuideLibrary(lambda: tokenizer, tokenizer.size, 1)
    one, other = (GuideProgram(backend="llguidance", text='start: "a"', tenant=tenant) for tenant in ("one", "other"))
    assert library.start(one)[0] is library.start(one)[0]
    assert library.start(one)[0] is not library.start(other)[0]


def test_texts_of_guides_that_left_leave_room_for_others(tokenizer, monkeypatch):
    monkeypatch.setattr("troupellm.models.structured_outputs.matcher_cache.MOST_TEXT_BYTES", 25)
    library = GuideLibrary(lambda: tokenizer, tokenizer.size, 1)
    for letter in "abcdefgh":  # ten bytes each, so that two fit
        library.matcher(GuideProgram(backend="llguidance", text=f'start: "{letter}"'))
    assert library.num_built == 2
