"""Prompts of an engine in another process: rendered, tokenized and checked here, with its tokenizer and its limits."""

from functools import partial
from pathlib import Path

from troupellm.actors.input.actor import has_short_lists, is_short, letters_of
from troupellm.actors.input.long_texts import LONG_LETTERS, LongTexts
from troupellm.actors.input.prepare import Preparer
from troupellm.actors.runtime.ports import Clock, Threads
from troupellm.models.chat_parsers.served_parser import ChatFormat, chat_format_of
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.chat_template.template_process import Renderer
from troupellm.models.hub.model_folder import readable
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import InvalidRequest, RequestFailed, TroupeError
from troupellm.protocol.messages.input import EmbedsPrompt, Submission, TokensPrompt
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.wire.api_process import Serving


def read_tokenizer(serving: Serving, renderer: Renderer) -> tuple[Tokenizer, ChatFormat]:
    """Tokenizer and chat format, from the folder that the engine's process has on this machine."""
    model = serving.config.model
    name = model.model if model.tokenizer is None else model.tokenizer
    folder = readable(Path(serving.tokenizer_folder), name, model.allow_model_links)
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, model.chat_template, renderer)
    chat_format = chat_format_of(model, tokenizer, template, folder)
    chat_format.template.fit(serving.limits.max_model_len)
    return tokenizer, chat_format


class Prompts:
    def __init__(
        self, serving: Serving, tokenizer: Tokenizer, template: ChatTemplate, threads: Threads, clock: Clock
    ) -> None:
        self._long_texts = LongTexts(threads, clock)
        self._preparer, self._patient = (
            Preparer(tokenizer, each, serving.limits, serving.ready, iter(())) for each in (template, template.patient)
        )

    def stream_interval(self, params: SamplingParams) -> int | None:
        """See `Preparer.stream_interval`."""
        return self._preparer.stream_interval(params)

    async def prepare(self, submission: Submission) -> TokensPrompt:
        """The prompt's token ids, checked together with the parameters; off the event loop where that is long.

        Raises:
            InvalidRequest: the engine cannot serve it.
        """
        try:
            quick = partial(_checked, self._preparer, submission)
            if is_short(submission.prompt) and has_short_lists(submission.params):
                return quick()
            letters = letters_of(submission.prompt, LONG_LETTERS)
            patient = partial(_checked, self._patient, submission)
            return await self._long_texts.run_twice(submission.tenant, letters, quick, patient)
        except TroupeError:
            raise
        except Exception as cause:  # a template or a tokenizer that breaks breaks this request only
            raise RequestFailed("the request could not be prepared") from cause


def _checked(preparer: Preparer, submission: Submission) -> TokensPrompt:
    if submission.pooling is not None:
        return preparer.pooled(submission.prompt, submission.pooling)[0]
    if isinstance(submission.prompt, EmbedsPrompt):
        message = "prompt_embeds is only for an engine in the caller's own process"
        raise InvalidRequest(message, param="prompt_embeds", code="unsupported_parameter")
    return preparer.checked(submission.prompt, submission.params)[0]
