"""An input processor with its neighbours' mailboxes."""

import itertools
import json

import anyio
import pytest

from troupellm.actors.input.actor import Intake
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import SystemClock
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import PrepareRequest, Submission
from troupellm.protocol.messages.worker import CacheGroup, WorkerReady
from troupellm.protocol.params.sampling import Limits, SamplingParams
from troupellm.tests.support.checkpoints import text_models

VOCAB_WIDTH = 400
CONTEXT = 64
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content + '' }}{% endfor %}"


class Slot:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.woken = False

    def fail(self, error, spent=None):
        self.error = error

    def wake(self):
        self.woken = True


class FixedSeeds:
    def seed(self) -> int:
        return 2**64 - 7

    def token(self, nbytes: int) -> str:
        return "0" * (2 * nbytes)


class HeldThreads:
    """Calls begin when the test says so."""

    def __init__(self) -> None:
        self.gate = anyio.Event()
        self.calls = 0

    async def run(self, function, *args):
        self.calls += 1
        await self.gate.wait()
        return function(*args)


class Bench:
    """An input processor with its neighbours' mailboxes."""

    def __init__(self, folder, write=text_models.byte_level, blocks: int = 100, capacity: int = 64) -> None:
        write(folder)
        eos = {"eos_token_id": [0, 1]}
        (folder / "generation_config.json").write_text(json.dumps(eos))
        self.tokenizer = Tokenizer.load(folder)
        self.template = ChatTemplate({"default": TEMPLATE}, {})
        self.inbox: Mailbox = Mailbox("intake", capacity)
        self.output: Mailbox = Mailbox("output", capacity)
        self.scheduler: Mailbox = Mailbox("scheduler", capacity)
        self.guide: Mailbox = Mailbox("guide", capacity)
        self.threads = HeldThreads()
        self.hash_key = b"a secret of the tests"
        ready = WorkerReady(
            vocab_width=VOCAB_WIDTH,
            max_model_len=CONTEXT,
            num_blocks=blocks,
            block_size=4,
            groups=(CacheGroup(num_layers=1),),
            dtype="float32",
            device="cpu",
            architecture="x",
            num_parameters=0,
            weight_bytes=0,
            kv_cache_bytes=0,
            activation_bytes=0,
            memory_free_bytes=0,
            load_seconds=0.0,
        )
        self.intake = Intake(
            self.inbox,
            self.output,
            self.scheduler,
            self.guide,
            tokenizer=self.tokenizer,
            chat_template=self.template,
            limits=Limits(vocab_width=VOCAB_WIDTH, max_model_len=CONTEXT),
            ready=ready,
            threads=self.threads,
            clock=SystemClock(),
            randomness=FixedSeeds(),
            rows=itertools.count(100),
            hash_key=self.hash_key,
        )
        self._numbers = itertools.count(1)

    async def put(self, prompt, params=None, *, deadline=None, **more) -> Slot:
        slot = Slot()
        number = next(self._numbers)
        message = PrepareRequest(
            request=number,
            submission=Submission(request_id=f"r{number}", prompt=prompt, params=params or SamplingParams(), **more),
            outbox=slot,
            arrival=1.5,
            deadline=deadline,
        )
        await self.inbox.put(message)
        return slot

    async def prepare(self, prompt, params=None, **more):
        """The messages sent on for one request, or the error that its outbox got."""
        slot = await self.put(prompt, params, **more)
        self.inbox.close()
        self.threads.gate.set()
        with anyio.fail_after(10):
            await self.intake.run()
        opened, submitted = self.output.take(), self.scheduler.take()
        if slot.error is not None:
            assert slot.woken
            assert opened is None
            assert submitted is None
            raise slot.error
        return opened, submitted

    async def refused(self, prompt, params=None, kind=InvalidRequest):
        with pytest.raises(kind) as caught:
            await self.prepare(prompt, params)
        return caught.value
