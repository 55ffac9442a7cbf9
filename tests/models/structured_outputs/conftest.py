"""The built-in tokenizer, and grammars built for it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.tests.support.engines.fixtures import anyio_backend, builtin_engine, checkpoint, tiny_engine
from troupellm.tests.support.guides.guide_crowd import VOCAB

__all__ = ["anyio_backend", "builtin_engine", "checkpoint", "tiny_engine"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUILTIN_FOLDER)


@pytest.fixture(scope="session")
def library(tokenizer: Tokenizer) -> GuideLibrary:
    return GuideLibrary(lambda: tokenizer, VOCAB, 2)


@pytest.fixture
def helper():
    with ThreadPoolExecutor(1) as pool:
        yield pool
