"""A worker that answers every chat with what its last user message says, token by token, and then ends.

So a test decides what the model writes, down to its special tokens, without a model that was trained to.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from troupellm.models.tokenizer import tokenizer as text
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import CacheGroup, LoadProgress, ProgressSink, StepPlan, StepResult, WorkerReady
from troupellm.tests.support.checkpoints.tiny_model import SPECIAL_TOKENS, write_tiny_model

FACTORY = "troupellm.tests.support.workers.echo_worker:EchoWorker"
BEGIN, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant"


def write_echo_model(
    folder: Path, *, special: tuple[str, ...] = (), added: tuple[str, ...] = (), template: str | None = None
) -> Path:
    """The tiny model's folder with further tokens.

    Args:
        special: tokens that are no text.
        added: tokens that are.
        template: instead of the tiny model's; it must write user messages as that one does.
    """
    write_tiny_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


class EchoWorker:
    """Implements `protocol.worker.Worker`."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = text.Tokenizer.load(folder)
        self._end = min(self._tokenizer.eos_token_ids)
        self._scripts: dict[int, list[int]] = {}
        self._prompts: dict[int, int] = {}

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        progress(LoadProgress(phase="weights", done=1, total=1))
        zeros: dict[str, Any] = dict.fromkeys(
            ("num_parameters", "weight_bytes", "kv_cache_bytes", "activation_bytes", "memory_free_bytes"), 0
        )
        return WorkerReady(
            vocab_width=self._tokenizer.size,
            max_model_len=1 << 17,
            num_blocks=1 << 14,
            block_size=config.cache.block_size,
            groups=(CacheGroup(num_layers=1),),
            dtype="float32",
            device="none",
            architecture="echo",
            load_seconds=0.0,
            **zeros,
        )

    def launch(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            ids = memoryview(new.token_ids).cast("i").tolist()
            self._prompts[new.row] = new.num_prompt_tokens
            self._scripts[new.row] = self._script(ids[: new.num_prompt_tokens])
        counts, tokens = [], []
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            position = start + count - self._prompts[row]
            counts.append(int(position >= 0))
            if position >= 0:
                script = self._scripts[row]
                tokens.append(script[position] if position < len(script) else self._end)
        for row in plan.freed_rows:
            self._scripts.pop(row, None)
        return StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=tuple(counts),
            tokens=tuple(tokens),
        )

    def _script(self, prompt: list[int]) -> list[int]:
        said = self._tokenizer.decode(prompt, skip_special_tokens=False).rpartition(BEGIN)[2].partition(END)[0]
        return self._tokenizer.encode(said, add_special_tokens=False) if said else [SPECIAL_TOKENS.index("<|im_end|>")]

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def reset(self) -> None:
        self._scripts.clear()
        self._prompts.clear()

    def close(self) -> None:
        """Holds nothing."""
