"""Built guides of one model: kept while they fit, so that a grammar is built once for all rows that follow it."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from troupellm.models.structured_outputs.after_thinking import Mark
from troupellm.models.structured_outputs.backend import Backend, BackendError, Matcher
from troupellm.models.structured_outputs.backends import make_backend, mask_words
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import MOST_PROGRAMS, MOST_TEXT_BYTES, EarlyEnd, GuideProgram

_MOST_MARKS = 16


class Built:
    """A program that was built: its matchers share their lexer's memory, and fail together when it grows too large."""

    __slots__ = ("key", "start")

    def __init__(self, key: tuple[str, str, str], start: Matcher) -> None:
        self.key = key
        self.start = start


class GuideLibrary:
    """Thread-safe: one thread may build while another one copies built programs."""

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
        self._built: OrderedDict[tuple[str, str, str], Built] = OrderedDict()
        self._marks: dict[tuple[str, EarlyEnd | None], Mark] = {}
        self._text_bytes = 0
        self._lock = Lock()
        """Held for moments only: a step may wait for it."""
        self._making = Lock()
        """Held while the tokenizer is read or a backend is made, which takes seconds. Taken before `_lock`, if both."""

    @property
    def mask_words(self) -> int:
        """int32 words of a mask, known as soon as one program is built. Reads the tokenizer if need be."""
        if not self._words:
            with self._making:
                self._count_words()
        return self._words

    def _count_words(self) -> None:
        self._words = mask_words(self._tokens(), self.vocab_width)

    @property
    def num_built(self) -> int:
        return len(self._built)

    def backend(self, name: str) -> Backend:
        """Raises BackendError: it cannot guide this model."""
        backend = self._backends.get(name)  # without a lock: a step must not wait for another backend that is made
        if backend is not None:
            return backend
        with self._making:
            return self._backend(name)

    def matcher(self, program: GuideProgram) -> Matcher:
        """A matcher at the program's start. Raises as `start` does."""
        return self.start(program)[1]

    def start(self, program: GuideProgram) -> tuple[Built, Matcher]:
        """A matcher at the program's start, and the built program it was copied from.

        Raises:
            GuideError: the program cannot be built.
        """
        key = program.backend, program.text, program.tenant
        with self._lock:
            built = self._built.get(key)
            if built is not None:
                self._built.move_to_end(key)
                return built, built.start.copy()
        made = self.backend(program.backend).compile(
            program.text
        )  # without the lock: others, whose grammars are built, are in a step
        with self._lock:
            built = self._built.get(key)
            if built is None:
                built = self._keep(key, made)
            return built, built.start.copy()

    def again(self, built: Built) -> Matcher:
        """Another matcher at the start of a program that was built, kept or not."""
        with self._lock:
            return built.start.copy()

    def drop(self, built: Built) -> None:
        """Keep it no longer: the next one to need its program builds it anew."""
        with self._lock:
            if self._built.get(built.key) is built:
                del self._built[built.key]
                self._text_bytes -= len(built.key[1])

    def mark(self, program: GuideProgram) -> Mark:
        """The tables of the mark that a program waits for, and of this vocabulary."""
        key = program.after, program.early_end
        with self._lock:
            mark = self._marks.get(key)
            if mark is not None:
                return mark
        tokenizer = self._tokenizer  # without a lock: a step must not wait while a backend is made
        if tokenizer is None:
            with self._making:
                tokenizer = self._tokens()
        mark = Mark(program.after, tokenizer, self.vocab_width, early_end=program.early_end)
        with self._lock:
            if len(self._marks) >= _MOST_MARKS:
                self._marks.clear()
            self._marks[key] = mark
        return mark

    def _backend(self, name: str) -> Backend:
        backend = self._backends.get(name)
        if backend is None:
            self._count_words()  # here, so that no step waits for `_making` to know it
            backend = make_backend(name, self._tokens(), self.vocab_width, self._num_threads)
            self._backends[name] = backend
        return backend

    def _tokens(self) -> Tokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._read_tokenizer()
            except Exception as error:  # the model's files may hold anything
                raise BackendError("this model's tokenizer cannot be read") from error
        return self._tokenizer

    def _keep(self, key: tuple[str, str, str], made: Matcher) -> Built:
        built = self._built[key] = Built(key, made)
        self._text_bytes += len(key[1])
        while len(self._built) > 1 and (self._text_bytes > MOST_TEXT_BYTES or len(self._built) > MOST_PROGRAMS):
            (_, text, _), _ = self._built.popitem(last=False)
            self._text_bytes -= len(text)
        return built
