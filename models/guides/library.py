"""Built guides of one model: kept while they fit, so that a grammar is built once for all rows that follow it."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from troupellm.models.guides.backend import Backend, GuideError, Matcher
from troupellm.models.guides.backends import make_backend, mask_words
from troupellm.models.guides.thinking import Mark
from troupellm.models.tokenizer import Tokenizer
from troupellm.protocol.guide import GuideProgram

MOST_TEXT_BYTES = 16 * 2**20
"""Of the grammars that are kept; built, one takes several times as much."""
MOST_PROGRAMS = 256
_MOST_MARKS = 16


class GuideLibrary:
    """Safe in several threads: builds on one thread while another one copies what is built."""

    def __init__(self, read_tokenizer: Callable[[], Tokenizer], vocab_width: int, num_threads: int) -> None:
        """
        Args:
            read_tokenizer: called when the first guide comes.
            num_threads: for filling masks.
        """
        self.vocab_width = vocab_width
        self._read_tokenizer = read_tokenizer
        self._num_threads = num_threads
        self._tokenizer: Tokenizer | None = None
        self._words = 0
        self._backends: dict[str, Backend] = {}
        self._built: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._marks: dict[str, Mark] = {}
        self._text_bytes = 0
        self._lock = Lock()

    @property
    def mask_words(self) -> int:
        """int32 words of a mask. Reads the tokenizer if need be."""
        if not self._words:
            with self._lock:
                self._words = mask_words(self._tokens(), self.vocab_width)
        return self._words

    @property
    def num_built(self) -> int:
        return len(self._built)

    def backend(self, name: str) -> Backend:
        """Raises GuideError: it cannot guide this model."""
        with self._lock:
            return self._backend(name)

    def matcher(self, program: GuideProgram) -> Matcher:
        """A matcher at the program's start.

        Raises:
            GuideError: the program cannot be built.
        """
        key = program.backend, program.text
        with self._lock:
            built = self._built.get(key)
            if built is not None:
                self._built.move_to_end(key)
                return built.copy()
            backend = self._backend(program.backend)
        built = backend.compile(program.text)  # without the lock: others, whose grammars are built, are in a step
        with self._lock:
            if key not in self._built:
                self._keep(key, built)
            return built.copy()

    def mark(self, text: str) -> Mark:
        """What is known of a mark that ends thinking."""
        with self._lock:
            mark = self._marks.get(text)
            if mark is not None:
                return mark
            tokenizer = self._tokens()
        mark = Mark(text, tokenizer, self.vocab_width)
        with self._lock:
            if len(self._marks) >= _MOST_MARKS:
                self._marks.clear()
            self._marks[text] = mark
        return mark

    def _backend(self, name: str) -> Backend:
        backend = self._backends.get(name)
        if backend is None:
            backend = make_backend(name, self._tokens(), self.vocab_width, self._num_threads)
            self._backends[name] = backend
        return backend

    def _tokens(self) -> Tokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._read_tokenizer()
            except Exception as error:  # whatever the files of somebody's model hold
                raise GuideError("this model's tokenizer cannot be read") from error
        return self._tokenizer

    def _keep(self, key: tuple[str, str], built: Matcher) -> None:
        self._built[key] = built
        self._text_bytes += len(key[1])
        while len(self._built) > 1 and (self._text_bytes > MOST_TEXT_BYTES or len(self._built) > MOST_PROGRAMS):
            (_, text), _ = self._built.popitem(last=False)
            self._text_bytes -= len(text)
