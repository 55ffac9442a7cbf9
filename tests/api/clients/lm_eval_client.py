"""lm-eval over a small local task. Arguments: URL of the API, model, folder of its tokenizer, folder to work in.

Prints the scores as JSON, and what they must be as far as the harness says.
"""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

SUMS = [(2, 3), (10, 4), (7, 8), (1, 1), (23, 45), (6, 6)]
CHOICES = """
task: troupe_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
GENERATED = """
task: troupe_%s
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{%s}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["<end>"], max_gen_toks: 16, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def main(url: str, model: str, tokenizer: str, folder: str) -> None:
    place = Path(folder)
    rows = [
        {
            "question": f"What is {first} + {second}?",
            "choices": [str(first + second), str(first + second + 1)],
            "answer": 0,
            "target": str(first + second),
            "story": f"Once upon a time there were {first} cats and",
        }
        for first, second in SUMS
    ]
    data = place / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "choices.yaml").write_text(CHOICES.format(data=data))
    for name in ("question", "story"):
        (place / f"{name}.yaml").write_text(GENERATED.replace("%s", name).format(data=data))
    tasks = TaskManager(include_path=str(place), include_defaults=False)
    common = {"model": model, "tokenizer": tokenizer, "tokenizer_backend": "huggingface", "num_concurrent": 2}
    seen = {}
    for name, path, given in (
        ("local-completions", "completions", ["troupe_choices", "troupe_story"]),
        ("local-chat-completions", "chat/completions", ["troupe_question"]),
    ):
        more = {"max_retries": 1} if name == "local-completions" else {"max_retries": 1, "tokenizer_backend": None}
        result = lm_eval.simple_evaluate(
            model=name,
            model_args=common | more | {"base_url": f"{url}/{path}"},
            tasks=given,
            task_manager=tasks,
            apply_chat_template=name == "local-chat-completions",
            log_samples=True,
            bootstrap_iters=0,
        )
        for task in given:
            samples = result["samples"][task]
            seen[f"{name} {task}"] = {
                "scores": {key: value for key, value in result["results"][task].items() if isinstance(value, float)},
                "answers": [sample["resps"] for sample in samples],
                "asked": [sample["arguments"] for sample in samples] if task == "troupe_choices" else [],
            }
    print(json.dumps(seen))


main(*sys.argv[1:5])
