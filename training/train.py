"""Train the built-in model: ``python -m troupellm.training.train --minutes 60``.

The learning rate follows the clock: however fast the machine, the run warms up, works and decays
within the minutes given. The state is written regularly, and ``--resume`` goes on from it.

``--from FOLDER`` begins with finished weights instead of random ones: some minutes more, at a lower rate, on a mixture
that mends sums and keeps the rest. The record beside the weights then tells of both runs.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from troupellm.training import corpus, record
from troupellm.training.batches import Batch, Packer, token_id
from troupellm.training.documents import END_OF_TEXT, TURN_END
from troupellm.training.evaluate import WEIGHTS, score
from troupellm.training.network import Network, Shape
from troupellm.training.resumable import start

ROWS, LENGTH = 8, 512
# Every so many steps a batch of the same size in fewer, longer rows.
LONGER = ((64, 1, 4096), (16, 2, 2048))
# Minutes, peak learning rate and the share of the run that decays: from nothing, and from finished weights.
SCHEDULE, CONTINUED_SCHEDULE = (60.0, 3e-3, 0.4), (12.0, 1e-3, 0.8)


@dataclass(slots=True)
class Progress:
    """Where a run stands; it survives in the metadata of the state file."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


class Yielding:
    """Goes down to one thread while the machine is shared.

    Threads that wait for each other at every product run at the pace of the slowest: next to a busy
    neighbour, one thread on the free core is much faster than two that stand still together.
    """

    HOLD = 20

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._hold = 0
        self._clocks = (0.0, 0.0)

    def before(self) -> None:
        """Choose the threads of the coming step."""
        torch.set_num_threads(1 if self._hold > 0 else self._threads)
        self._clocks = (time.monotonic(), time.process_time())

    def after(self) -> None:
        """Look at how much of the processor the step was given."""
        wall, used = time.monotonic() - self._clocks[0], time.process_time() - self._clocks[1]
        if self._hold > 0:
            self._hold -= 1
        elif used < 0.75 * self._threads * wall:
            self._hold = self.HOLD


class Trainer:
    """The network, its optimizers and the state file."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        source: Path | None = options.source
        self.earlier = record.read(source) if source else []
        minutes, rate, decay = CONTINUED_SCHEDULE if source else SCHEDULE
        self.minutes, self.peak, self.decay = options.minutes or minutes, options.rate or rate, options.decay or decay
        self.tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
        self.network = Network(Shape(vocab_size=self.tokenizer.get_vocab_size()))
        if source:
            self.network.load_checkpoint(load_file(source / "model.safetensors"))
        self.body: Callable[[Tensor], Tensor] = self.network
        if options.compile:
            self.body = torch.compile(self.network, dynamic=False)
        matrices = [p for n, p in self.network.named_parameters() if n.startswith("blocks") and p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for p in self.network.parameters() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                lr=self.peak,
                weight_decay=0.02,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rest, lr=self.peak, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.progress = Progress()

    def rate(self) -> float:
        """The factor of the learning rate at this time: warm-up, plateau, decay to nothing."""
        done = min(1.0, self.progress.seconds / (self.minutes * 60))
        warm = min(1.0, (self.progress.step + 1) / 100)
        return float(warm * min(1.0, max(0.0, 1.0 - done) / self.decay))

    def stage(self) -> int:
        """Which column of the mixture is read at this time."""
        if self.earlier:
            return corpus.CONTINUED
        return int(self.progress.seconds >= self.options.first * self.minutes * 60)

    def learn(self, batch: Batch) -> float:
        """One step; the head is applied only where the loss has a weight."""
        at = batch.weights.flatten().nonzero().squeeze(1)
        whole = batch.tokens.shape[1] == LENGTH
        with torch.autocast("cpu", torch.bfloat16):
            hidden = (self.body if whole else self.network)(batch.tokens)
            logits = self.network.logits(hidden.flatten(0, 1)[at])
        weights = batch.weights.flatten()[at]
        losses = F.cross_entropy(logits.float(), batch.targets.flatten()[at], reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.peak * self.rate()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += batch.tokens.numel()
        return loss.item()

    def run(self) -> None:
        """Train until the minutes are over."""
        options, progress = self.options, self.progress
        yielding = Yielding(options.threads)
        packer = Packer(self.tokenizer, f"training {options.seed} from {progress.step}")
        last_save = last_score = progress.seconds
        start = time.monotonic() - progress.seconds
        smooth = 0.0
        with tqdm(
            total=round(self.minutes * 60),
            initial=round(progress.seconds),
            unit="s",
            bar_format="{percentage:3.0f}% |{bar:20}| {elapsed} of {total}s {postfix}",
            mininterval=10.0,
        ) as bar:
            while progress.seconds < self.minutes * 60:
                yielding.before()
                loss = self.learn(packer.batch(*self._form(), self.stage()))
                yielding.after()
                smooth = loss if not smooth else 0.98 * smooth + 0.02 * loss
                progress.seconds = time.monotonic() - start
                left = self.minutes - progress.seconds / 60
                bar.set_postfix_str(
                    f"step {progress.step} loss {smooth:.4f} {progress.tokens / 1e6:.2f} M tokens"
                    f" {progress.tokens / progress.seconds:.0f} tokens/s ETA {left:.1f} min",
                    refresh=False,
                )
                bar.update(round(progress.seconds) - bar.n)
                if progress.seconds - last_save > options.save_every:
                    last_save = progress.seconds
                    self.save()
                if progress.seconds - last_score > options.score_every:
                    last_score = progress.seconds
                    self.report(bar.write)
        self.save()
        self.export(options.output)

    def _form(self) -> tuple[int, int]:
        for every, rows, length in LONGER:
            if self.progress.step % every == every - 1:
                return rows, length
        return ROWS, LENGTH

    def report(self, write: Callable[[str], None]) -> None:
        """Score a small sample of held-out questions."""
        result = score(self.network, self.tokenizer, self.options.sample)
        text = ", ".join(f"{task} {passed / max(asked, 1):.0%}" for task, (passed, asked) in result.items())
        write(f"step {self.progress.step}, {self.progress.seconds / 60:.1f} min: {text}")

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.network.named_parameters():
            yield f"network.{name}", parameter.detach()
        for index, optimizer in enumerate(self.optimizers):
            for slot, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    yield f"optimizer.{index}.{slot}.{key}", value

    def save(self) -> None:
        """Write the state: network, optimizers, progress."""
        progress = self.progress
        meta = {"step": progress.step, "seconds": progress.seconds, "tokens": progress.tokens}
        path: Path = self.options.state
        fresh = path.with_suffix(".new")
        save_file(dict(self._tensors()), fresh, {name: str(value) for name, value in meta.items()})
        fresh.replace(path)

    def restore(self) -> None:
        """Read the state back."""
        tensors = load_file(self.options.state)
        with safe_open(self.options.state, "pt") as opened:
            meta = opened.metadata()
        self.progress = Progress(int(meta["step"]), float(meta["seconds"]), int(meta["tokens"]))
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(tensors[f"network.{name}"])
        for index, optimizer in enumerate(self.optimizers):
            whole = optimizer.state_dict()
            for name, value in tensors.items():
                kind, _, tail = name.partition(f".{index}.")
                if kind == "optimizer":
                    slot, _, key = tail.partition(".")
                    whole["state"].setdefault(int(slot), {})[key] = value
            optimizer.load_state_dict(whole)

    def export(self, folder: Path) -> None:
        """Write what is shipped: weights and configurations."""
        folder.mkdir(parents=True, exist_ok=True)
        pad = token_id(self.tokenizer, END_OF_TEXT)
        ends = [token_id(self.tokenizer, TURN_END), pad]
        generation = {"eos_token_id": ends, "pad_token_id": pad, "do_sample": False}
        save_file(self.network.checkpoint(), folder / "model.safetensors", {"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        for name, content in (
            ("config.json", self.network.shape.config(ends, pad)),
            ("generation_config.json", generation),
        ):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((WEIGHTS / name).read_bytes())
        record.write(folder, [*self.earlier, self._done()])

    def _done(self) -> record.Stage:
        """This run's entry of the record."""
        progress = self.progress
        return record.Stage(
            text=record.CONTINUED if self.earlier else record.FROM_NOTHING,
            minutes=round(progress.seconds / 60, 1),
            threads=self.options.threads,
            rate=self.peak,
            steps=progress.step,
            tokens=progress.tokens,
        )


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="go on from the weights there, which keep their record; --resume and --export-only need it again",
    )
    parser.add_argument("--minutes", type=float, help="length of the whole run (60; 12 with --from)")
    parser.add_argument("--rate", type=float, help="peak learning rate (0.003; 0.001 with --from)")
    parser.add_argument("--first", type=float, default=0.65, help="share of the run in the first stage")
    parser.add_argument("--decay", type=float, help="share of the run that decays (0.4; 0.8 with --from)")
    parser.add_argument("--sample", type=int, default=24, help="cases per task while training")
    parser.add_argument("--score-every", type=float, default=400.0, help="seconds")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    start(parser, Trainer, state="builtin-state.safetensors", output=WEIGHTS, threads=2)


if __name__ == "__main__":
    main()
