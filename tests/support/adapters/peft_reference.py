"""Adapters that PEFT makes and saves, and the greedy tokens of `transformers` with them, unmerged.

    PYTHONPATH=FOLDER_OF_PEFT python peft_reference.py BASE_FOLDER OUT_FOLDER CASES

CASES is a JSON object: LoraConfig's arguments by name, and under "prompts" lists of token ids. Each adapter is saved in
OUT_FOLDER/NAME, and its answers in OUT_FOLDER/NAME.safetensors: `tokens.N` and, of the steps that chose them,
`logits.N`. A process of its own: transformers imports peft wherever it finds it, which slows down every other test.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

NEW_TOKENS = 10


def answers(model: torch.nn.Module, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    found = {}
    for number, prompt in enumerate(prompts):
        tokens, chosen = list(prompt), []
        for _ in range(NEW_TOKENS):
            chosen.append(model(torch.tensor([tokens])).logits[0, -1])
            tokens.append(int(chosen[-1].argmax()))
        found[f"tokens.{number}"] = torch.tensor(tokens[len(prompt) :])
        found[f"logits.{number}"] = torch.stack(chosen)
    return found


@torch.no_grad()
def main(base: str, out: str, cases: str) -> None:
    import peft

    given = json.loads(cases)
    prompts = given.pop("prompts")
    for number, (name, arguments) in enumerate(given.items()):
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        torch.manual_seed(number)
        if arguments is not None:
            model = peft.get_peft_model(model, peft.LoraConfig(**arguments)).eval()
            for key, parameter in model.named_parameters():
                if "lora_magnitude" in key:
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
                elif "lora_" in key:  # PEFT's own second matrix is zero, which would prove nothing
                    parameter.normal_(0.0, 0.2)
                elif "modules_to_save" in key:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
            model.save_pretrained(Path(out) / name)
        save_file(answers(model, prompts), Path(out) / f"{name}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
