"""Steps in flight on a device, and the work left for each until it is collected."""

from collections import deque

import torch

from troupellm.models.batch.step_result import step_result
from troupellm.models.gpu.device import Device
from troupellm.models.gpu.guided_rows import LateChoices
from troupellm.models.gpu.host_transfer import Results
from troupellm.models.gpu.launched_step import LaunchedPlan
from troupellm.models.gpu.sample import only, sampled_of
from troupellm.protocol.messages.worker import MOST_LAUNCHED, StepPlan, StepResult


class LaunchedSteps:
    """Oldest first. Calls come from one thread, in torch's inference mode."""

    def __init__(self, device: Device, results: Results, late: LateChoices | None, vocab: int) -> None:
        """
        Args:
            late: of guided rows, where there may be some.
            vocab: the logits' width.
        """
        self._device, self._results, self._late, self._vocab = device, results, late, vocab
        self._tickets: deque[LaunchedPlan] = deque()

    def __bool__(self) -> bool:
        return bool(self._tickets)

    @property
    def full(self) -> bool:
        """True if a step must be collected before another one is launched."""
        return len(self._tickets) == MOST_LAUNCHED

    @property
    def untold(self) -> bool:
        """True if the guides have not yet been given a step's tokens."""
        return any(ticket.guided and ticket.result is None for ticket in self._tickets)

    def add(self, ticket: LaunchedPlan) -> None:
        """Add a launched step. If its choice of tokens is open and all earlier tokens are known, make it now."""
        if ticket.choice is None or not self.untold:
            self._complete(ticket)
        self._tickets.append(ticket)

    def collect(self, ticket: LaunchedPlan) -> StepResult:
        """Wait for the oldest one.

        Raises:
            RuntimeError: another one is older; or of the device.
        """
        if not self._tickets or self._tickets[0] is not ticket:
            raise RuntimeError("tickets are collected in the order of their launches")
        self.complete()
        result = self._finish(ticket)
        self._tickets.popleft()
        return result

    @torch.inference_mode()
    def complete(self) -> None:
        """Launch the rest of the oldest step; all tokens before it are known."""
        if self._tickets and self._tickets[0].choice is not None:
            self._complete(self._tickets[0])

    def make_way(self, plan: StepPlan) -> None:
        """Before rows of a plan come: give the guides the last tokens of the rows that had their numbers before."""
        numbers = {new.row for new in plan.new_rows}
        if self.untold and any(not numbers.isdisjoint(ticket.rows) for ticket in self._tickets):
            self.catch_up()

    def catch_up(self) -> None:
        """Before another step is launched: take in the result of the complete one in flight."""
        for ticket in self._tickets:
            self._finish(ticket)

    def _complete(self, ticket: LaunchedPlan) -> None:
        if ticket.choice is not None:
            assert self._late is not None
            ticket.returned = self._results.fetch(self._late.make(ticket).flatten())
        ticket.done = self._device.record()

    def _finish(self, ticket: LaunchedPlan) -> StepResult:
        if ticket.done is not None:
            ticket.done.wait()
        if ticket.result is None:
            assert ticket.returned is not None
            found = sampled_of(
                ticket.returned.numpy().copy(),
                ticket.rows,
                ticket.positions,
                ticket.logprob_parts,
                self._vocab,
                ticket.reasons,
            )
            if ticket.kept is not None:
                found = only(found, ticket.kept)
            guided = None if self._late is None else self._late.report_tokens(ticket, found)
            ticket.result = step_result(ticket.plan, found, ticket.sampling, (), ticket.timings, guided=guided)
        return ticket.result
