"""The answer of a request that runs, as vLLM's engines give it: the whole so far, what is new, or the end alone."""

from collections.abc import Sequence

from troupellm.actors.client.stream import Stream
from troupellm.actors.llm.outputs import CompletionOutput, Logprob, RequestOutput, token_logprobs
from troupellm.protocol.params.output_kind import RequestOutputKind
from troupellm.protocol.params.outputs import Delta, FinishReason, Usage


class _Sequence:
    """One of the answers."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.cumulative_logprob: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.is_new = True

    def add(self, delta: Delta) -> None:
        self.is_new = True
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(token_logprobs(entry) for entry in delta.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(entry.logprob for entry in delta.logprobs)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def forget(self) -> None:
        """Drop what was given, so that the next output has only what is new."""
        self.is_new = False
        self.text, self.token_ids = "", []
        self.logprobs = None if self.logprobs is None else []


class GrowingAnswer:
    """Takes the pieces of one stream and makes outputs of them."""

    def __init__(self, stream: Stream, kind: RequestOutputKind) -> None:
        self._stream = stream
        self._kind = kind
        self._sequences: dict[int, _Sequence] = {}

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            sequence = self._sequences.setdefault(delta.index, _Sequence(delta.index))
            sequence.add(delta)

    def output(self, *, finished: bool) -> RequestOutput:
        """The output for this moment.

        Args:
            finished: the stream has ended.
        """
        delta = self._kind is RequestOutputKind.DELTA
        given = [each for _, each in sorted(self._sequences.items()) if each.is_new or not delta]
        outputs = [each.output() for each in given]
        if delta:
            for each in given:
                each.forget()
        stream = self._stream
        prompt_logprobs = stream.prompt_logprobs
        usage = stream.usage or Usage(prompt_tokens=len(stream.prompt_token_ids), completion_tokens=0)
        return RequestOutput(
            request_id=stream.request_id,
            prompt=stream.prompt,
            prompt_token_ids=list(stream.prompt_token_ids),
            prompt_logprobs=None
            if prompt_logprobs is None
            else [None if entry is None else token_logprobs(entry) for entry in prompt_logprobs],
            outputs=outputs,
            finished=finished,
            num_cached_tokens=usage.cached_tokens,
            metrics=stream.timing,
            usage=usage,
        )
