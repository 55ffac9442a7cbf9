"""The built-in model on a device, kernel by kernel and then by graphs: its greedy tokens are those of the CPU.

`python -m troupellm.load_tests.gpu.same_tokens DEVICE` prints a line of JSON: by mode "same", or the difference.
"""

import json
import sys

import troupellm

PROMPTS = (
    "Once upon a time", "What is 23 + 45?", "The fox", "Tell me a story about a bear.", "a", "1, 2, 3, 4, 5,",
    "Write a poem. " * 20, "The end of the story is",
)  # fmt: skip
TOKENS = 48
MODES = {"kernel by kernel": True, "by graphs": False}


def greedy_tokens(device: str, *, enforce_eager: bool) -> list[list[int]]:
    """Token ids of the answers to `PROMPTS`, computed together in float32."""
    model = troupellm.LLM(
        device=device, dtype="float32", enforce_eager=enforce_eager, max_model_len=512, max_num_seqs=len(PROMPTS)
    )
    try:
        sampling = troupellm.SamplingParams(temperature=0.0, max_tokens=TOKENS)
        return [list(answer.outputs[0].token_ids) for answer in model.generate(list(PROMPTS), sampling)]
    finally:
        model.close()


def difference(expected: list[list[int]], found: list[list[int]]) -> str:
    """ "same", or the first prompt and token at which two lists of answers differ."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other:
            place = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
            return f"answer {number} differs at token {place} of {len(one)}"
    return "same"


def compared(device: str) -> dict[str, str]:
    """By mode the difference from the CPU's tokens, or the error that ended it."""
    expected = greedy_tokens("cpu", enforce_eager=True)
    told = dict[str, str]()
    for mode, enforce_eager in MODES.items():
        try:
            told[mode] = difference(expected, greedy_tokens(device, enforce_eager=enforce_eager))
        except Exception as error:
            told[mode] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return told


if __name__ == "__main__":
    print(json.dumps(compared(sys.argv[-1])))
