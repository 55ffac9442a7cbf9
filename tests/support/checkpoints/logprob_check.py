"""Every log-probability that a worker gives along a sequence, against those of transformers."""

import numpy as np
import torch
import transformers

from troupellm.models.runner.runner import ModelRunner
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.messages.copies import NO_STATE, StateCopy
from troupellm.protocol.messages.worker import NewRow, RowLogprobs, SamplingState, StepPlan

PROMPT = (5, 17, 120, 3, 44, 9, 201, 8, 77, 30, 41, 2, 250, 66, 19, 180, 99, 23, 7, 140, 88, 212, 35, 11)
CUTS = ((0, 13), (13, len(PROMPT) - 13))
NEW_TOKENS = 6
BLOCKS = 16
TOLERANCE = 5e-4
ROUNDED = 2e-3
"""Where products round their inputs to fifteen bits, as a CPU's with the blocks of a GGUF file do."""


def check_logprobs(worker: ModelWorker, model: transformers.PreTrainedModel, tolerance: float = TOLERANCE) -> None:
    """Compute a prompt in two pieces and then greedy tokens one by one.

    Each given token and each sampled one has transformers' log-probability, and sampled ones are the most likely.
    """
    sampling = SamplingState(temperature=0.0, logprobs=0, prompt_logprobs=0)
    new = NewRow(
        row=0,
        epoch=0,
        request_id="0",
        token_ids=np.array(PROMPT, dtype="<i4").tobytes(),
        num_prompt_tokens=len(PROMPT),
        sampling=sampling,
        blocks=(tuple(range(BLOCKS)),),
        state=0,
    )
    runner = worker.runner
    stateful = isinstance(runner, ModelRunner) and runner.cache.states is not None
    begun = (StateCopy(NO_STATE, 0),) if stateful else ()
    tokens, found = list(PROMPT), dict[int, float]()
    spans = [*CUTS, *((len(PROMPT) + index, 1) for index in range(NEW_TOKENS - 1))]
    for step, (start, count) in enumerate(spans):
        plan = StepPlan(
            step=step,
            engine_epoch=0,
            rows=(0,),
            epochs=(0,),
            starts=(start,),
            counts=(count,),
            new_rows=() if step else (new,),
            states=begun if step == 0 else (),
        )
        result = worker.collect(worker.launch(plan))
        tokens += result.tokens
        for part in (*result.prompt_logprobs, *result.logprobs):
            found |= _by_position(part)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    own = torch.tensor([found[position] for position in range(1, len(tokens))])
    chosen = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(own, chosen, atol=tolerance, rtol=0)
    behind = expected.max(-1).values - chosen
    assert behind[len(PROMPT) - 1 :].max() <= tolerance


def _by_position(part: RowLogprobs) -> dict[int, float]:
    values = np.frombuffer(part.logprobs, dtype="<f4").reshape(-1, part.width)[:, 0]
    return {part.position + index: float(value) for index, value in enumerate(values)}
