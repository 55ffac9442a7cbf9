"""Train the drafters of the built-in model: ``python -m troupellm.training.drafters_train --steps
2000``.

The texts come from ``outputs``. All drafters learn from the same batches, so that the model runs once for the three of
them. The state is written regularly, and ``--resume`` goes on from it; the same seed, steps and shards give the same
weights. ``--from FOLDER`` begins with finished drafters: what follows a model whose own training went on.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from troupellm.training.drafters_data import Lesson, Lessons, draft_loss, eagle_loss, medusa_loss, pupils
from troupellm.training.drafters_evaluate import load_shipped
from troupellm.training.drafters_network import Eagle, Medusa
from troupellm.training.evaluate import WEIGHTS, load
from troupellm.training.network import Network
from troupellm.training.resumable import start

DRAFTERS = Path(__file__).parents[1] / "models" / "builtin" / "drafters"


class Pupil:
    """A drafter with its optimizers."""

    def __init__(self, name: str, module: nn.Module, rate: float) -> None:
        self.name, self.module, self._rate = name, module, rate
        embedding = [module.embedding.weight] if isinstance(module, Network) else []
        apart = {id(weight) for weight in embedding}
        matrices = [p for p in module.parameters() if p.ndim == 2 and id(p) not in apart]
        rest = [p for p in module.parameters() if p.ndim != 2 or id(p) in apart]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def learn(self, target: Network, lesson: Lesson, factor: float) -> float:
        """One step; the loss before it."""
        with torch.autocast("cpu", torch.bfloat16):
            if isinstance(self.module, Eagle):
                loss = eagle_loss(target, self.module, lesson)
            elif isinstance(self.module, Medusa):
                loss = medusa_loss(target, self.module, lesson)
            else:
                assert isinstance(self.module, Network)
                loss = draft_loss(self.module, lesson)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its weights and what its optimizers remember."""
        for name, parameter in self.module.named_parameters():
            yield f"{self.name}.weights.{name}", parameter.detach()
        for index, optimizer in enumerate(self.optimizers):
            for slot, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    yield f"{self.name}.optimizer.{index}.{slot}.{key}", value

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of ``tensors``."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(tensors[f"{self.name}.weights.{name}"])
        for index, optimizer in enumerate(self.optimizers):
            whole = optimizer.state_dict()
            start = f"{self.name}.optimizer.{index}."
            for name, value in tensors.items():
                if name.startswith(start):
                    slot, _, key = name.removeprefix(start).partition(".")
                    whole["state"].setdefault(int(slot), {})[key] = value
            optimizer.load_state_dict(whole)


class Trainer:
    """The model, its pupils and the state file."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.target, tokenizer = load(WEIGHTS)
        self.target.requires_grad_(requires_grad=False)
        self.lessons = Lessons(self.target, tokenizer, options.outputs, options.rows, options.first_shard)
        made = pupils(self.target)
        if options.source:
            load_shipped(made, options.source)
        self.pupils = [Pupil(name, made[name], options.rate) for name in options.only or made]
        self.step, self.seconds = 0, 0.0

    def factor(self) -> float:
        """Of the learning rate at this step: warm-up, plateau, decay to nothing."""
        steps, decay = int(self.options.steps), float(self.options.decay)
        return min(1.0, (self.step + 1) / 50, max(0.0, steps - self.step) / (decay * steps))

    def run(self) -> None:
        """Train until the steps are done."""
        smooth: dict[str, float] = {}
        source = self.lessons.batches(self.options.seed + self.step)
        with tqdm(total=self.options.steps, initial=self.step, mininterval=10.0) as bar:
            while self.step < self.options.steps:
                start = time.process_time()
                lesson = next(source)
                for pupil in self.pupils:
                    loss = pupil.learn(self.target, lesson, self.factor())
                    smooth[pupil.name] = 0.95 * smooth.get(pupil.name, loss) + 0.05 * loss
                self.step += 1
                self.seconds += time.process_time() - start
                text = " ".join(f"{name} {loss:.4f}" for name, loss in smooth.items())
                bar.set_postfix_str(f"{text} {self.seconds:.0f} s", refresh=False)
                bar.update()
                if self.step % self.options.save_every == 0:
                    self.save()
        self.save()
        self.export(self.options.output)

    def save(self) -> None:
        """Write the state."""
        path: Path = self.options.state
        fresh = path.with_suffix(".new")
        tensors = {name: value for pupil in self.pupils for name, value in pupil.tensors()}
        save_file(tensors, fresh, {"step": str(self.step), "seconds": str(self.seconds)})
        fresh.replace(path)

    def restore(self) -> None:
        """Read the state back."""
        tensors = load_file(self.options.state)
        with safe_open(self.options.state, "pt") as opened:
            meta = opened.metadata()
        self.step, self.seconds = int(meta["step"]), float(meta["seconds"])
        for pupil in self.pupils:
            pupil.restore(tensors)

    def export(self, folder: Path) -> None:
        """Write what is shipped, in float16: a folder per drafter."""
        target = json.loads((WEIGHTS / "config.json").read_text(encoding="utf-8"))
        for pupil in self.pupils:
            module, home = pupil.module, folder / pupil.name
            home.mkdir(parents=True, exist_ok=True)
            if isinstance(module, Network):
                config = module.shape.config(target["eos_token_id"], target["pad_token_id"]) | {
                    "torch_dtype": "float16"
                }
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    (home / name).write_bytes((WEIGHTS / name).read_bytes())
            else:
                assert isinstance(module, Eagle | Medusa)
                config = module.config(target)
            weights = module.checkpoint()
            halves = {name: value.detach().to(torch.float16).contiguous() for name, value in weights.items()}
            save_file(halves, home / "model.safetensors", {"format": "pt"})
            (home / "model.safetensors").chmod(0o644)
            (home / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--outputs", type=Path, default=Path("drafter-outputs"), help="the folder of shards")
    parser.add_argument("--first-shard", type=int, default=0, help="learn from this one on")
    parser.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help="begin with the drafters there")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=8, help="rows of 512 tokens in a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--decay", type=float, default=0.5, help="share of the steps in which the rate falls")
    parser.add_argument("--only", nargs="*", choices=("eagle", "medusa", "draft_model"), help="train these alone")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    start(parser, Trainer, state="drafters-state.safetensors", output=DRAFTERS, threads=1)


if __name__ == "__main__":
    main()
