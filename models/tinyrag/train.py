"""Trains the bundled model on generated handbooks, and exports it whenever it gets better.

    python models/tinyrag/train.py --minutes 90

A restart resumes from the last checkpoint; delete the checkpoint folder to start from the
beginning. The number of documents in a context grows as the model masters fewer. It learns at once
to copy *some* value, and to bind a value to its service only if several are possible.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.tinyrag.examples import ATTRIBUTE_IDS, SLOT_SIZES, Encoder
from models.tinyrag.export import export
from models.tinyrag.handbook import KINDS
from models.tinyrag.lessons import LEVELS, lessons, make_batch
from models.tinyrag.model import Batch, Losses, Shape, TinyLlama
from models.tinyrag.vocabulary import build_tokenizer

FOLDER = Path(__file__).resolve().parent

PASS_MARK = 0.6
"""Share of right answers with a level's usual number of documents that opens the next level."""
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
DECAY_SHARE = 0.3  # the last part of the run, in which the learning rate falls to nothing
AVERAGE_KEEP = 0.995
REPORT_SECONDS = 30
EVALUATE_SECONDS = 240


@dataclass
class Progress:
    """What a checkpoint keeps besides weights."""

    step: int = 0
    level: int = 0
    seconds: float = 0.0
    best: float = 0.0


class Trainer:
    """One run: model, optimizers, moving average of the weights, and where they are kept."""

    def __init__(self, out: Path, checkpoints: Path) -> None:
        torch.manual_seed(0)
        self.out = out
        self.path = checkpoints / "last.pt"
        self.tokenizer = build_tokenizer()
        self.encoder = Encoder(self.tokenizer)
        self.shape = Shape(len(self.tokenizer))
        self.model = TinyLlama(self.shape, SLOT_SIZES, len(ATTRIBUTE_IDS) + 1)
        self._alike_with_space()
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        matrices = [p for p in self.model.layers.parameters() if p.dim() == 2]
        inner = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in inner]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
        )
        self.progress = Progress()
        if self.path.exists():
            self._load()
        torch._dynamo.config.recompile_limit = 64
        for block in self.model.blocks:
            block.compile(dynamic=False)

    def _alike_with_space(self) -> None:
        """Starts "word" near " word": an answer's first token is copied without its space."""
        vocabulary = self.tokenizer.get_vocab()
        weight = self.model.embed_tokens.weight
        with torch.no_grad():
            for word, index in vocabulary.items():
                spaced = vocabulary.get("Ġ" + word)
                if spaced is not None:
                    weight[index] = 0.8 * weight[spaced] + 0.6 * weight[index]

    def _load(self) -> None:
        kept = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(kept["model"])
        self.average = kept["average"]
        for optimizer, state in zip(self.optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.progress = Progress(**kept["progress"])

    def save(self) -> None:
        """Writes the checkpoint that a later run goes on from."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        torch.save(
            {
                "model": self.model.state_dict(),
                "average": self.average,
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "progress": asdict(self.progress),
            },
            fresh,
        )
        fresh.replace(self.path)

    def learn(self, batch: Batch, remaining: float) -> tuple[Losses, Tensor]:
        """One step; `remaining` is the share of the run's time that is left."""
        fade = min(1.0, remaining / DECAY_SHARE)
        rate = LEARNING_RATE * max(0.02, fade) * min(1.0, (self.progress.step + 1) / WARMUP_STEPS)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            losses, exact = self.model(batch)
        teaching = losses.subject + losses.tag + 0.5 * (losses.title_target + losses.source_target)
        loss = losses.answer + (0.1 + 0.4 * fade) * teaching
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        keep = min(AVERAGE_KEEP, self.progress.step / (self.progress.step + 10))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter, 1 - keep)
        self.progress.step += 1
        return losses, exact

    def evaluate(self, documents: int, batches: int) -> dict[str, float]:
        """Exact match by kind of the averaged weights on names never trained on."""
        current = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.model.load_state_dict(self.average)
        rng = Random(f"evaluation {self.progress.step}")
        right, asked = np.zeros(len(KINDS)), np.zeros(len(KINDS))
        for _ in range(batches):
            batch = make_batch(self.encoder, rng, "held_out", documents, absent_share=1 / 3)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                exact = self.model(batch)[1]
            kinds = batch.kinds.flatten().numpy()
            right += np.bincount(kinds, exact.flatten().numpy(), len(KINDS))
            asked += np.bincount(kinds, minlength=len(KINDS))
        self.model.load_state_dict(current)
        return {k: round(float(r / a), 4) for k, r, a in zip(KINDS, right, asked, strict=True)}

    def measure_and_export(self) -> dict[str, float]:
        """Exact match by kind with eight documents; exports the weights if they are the best."""
        scores = self.evaluate(documents=8, batches=6)
        total = sum(scores.values())
        if total >= self.progress.best:
            self.progress.best = total
            metrics = {"teacher_forced_exact_match": scores, **asdict(self.progress)}
            export(self.out, self.shape, self.average, self.tokenizer, metrics)
        return scores


def train(minutes: float, out: Path, checkpoints: Path) -> None:
    """Trains for `minutes`, saving and exporting on the way."""
    trainer = Trainer(out, checkpoints)
    progress = trainer.progress
    source = lessons(LEVELS[progress.level], progress.step)
    started = reported = evaluated = time.monotonic()
    tokens = 0
    recent = 0.0  # moving average of exact match with at least the level's usual documents
    while (now := time.monotonic()) < started + 60 * minutes:
        count, batch = next(source)
        losses, exact = trainer.learn(batch, 1 - (now - started) / (60 * minutes))
        progress.seconds += time.monotonic() - now
        tokens += batch.context.numel() + batch.questions.numel()
        if count >= LEVELS[progress.level].usual:
            recent += 0.05 * (float(exact.float().mean()) - recent)
        if now - reported > REPORT_SECONDS:
            line: dict[str, object] = {
                f.name: round(float(getattr(losses, f.name)), 4) for f in fields(Losses)
            }
            line |= {"exact": round(recent, 4), "tokens_per_s": int(tokens / (now - reported))}
            line |= {"documents": count, "step": progress.step, "level": progress.level}
            print(json.dumps(line), flush=True)
            reported, tokens = now, 0
        if recent > PASS_MARK and progress.level + 1 < len(LEVELS):
            progress.level += 1
            recent = 0.0
            source = lessons(LEVELS[progress.level], progress.step)
        if now - evaluated > EVALUATE_SECONDS:
            print(json.dumps(trainer.measure_and_export()), flush=True)
            trainer.save()
            evaluated = time.monotonic()
    print(json.dumps(trainer.measure_and_export()), flush=True)
    trainer.save()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--out", type=Path, default=FOLDER / "model")
    parser.add_argument("--checkpoints", type=Path, default=FOLDER / ".checkpoints")
    args = parser.parse_args()
    train(args.minutes, args.out, args.checkpoints)


if __name__ == "__main__":
    main()
