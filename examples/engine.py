"""Selection on the device: data, irreducible losses, step and evaluation by `rholoss.engine`.

Runs anywhere in seconds; on a GPU each step is one CUDA graph. For your own data replace `resident` and
`make_model`; what does not fit the device goes into `Streamed` instead of `Resident`.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import rholoss as rho
from rholoss.demo.data import load
from rholoss.engine import Evaluator, Gate, Recorded, Resident, Trainer, fit_resident, one_cycle

STEPS, CANDIDATES, KEEP = 400, 320, 0.1
splits = load()  # 12,000 training points, a tenth with a wrong label; 4,000 clean test points


def resident(part: str) -> Resident:
    images = torch.from_numpy(splits[part].images.copy()).flatten(1).float() / 255
    return Resident(images, splits[part].given.astype("int64"))  # on a GPU if there is one


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


train, test = resident("train"), resident("test")
# Two halves, each scored by a model that never saw it: no holdout data, and all of it is trained on.
il = fit_resident(lambda: make_model(64), train, folds=2, epochs=6, seed=0)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())


def run(name: str, **options) -> Trainer:
    torch.manual_seed(0)
    options = {"irreducible": il, "candidates": CANDIDATES, "keep": KEEP, **options}
    trainer = Trainer(
        make_model(256), train, total_steps=STEPS, learning_rate=one_cycle(2e-3, STEPS), **options
    )
    evaluate = Evaluator(trainer.model, test, num_classes=10)
    for _ in range(4):
        trainer.train(STEPS // 4)
        trainer.flush()  # read what happened on the device; writes the log
        trainer.ledger.mark(evaluate().accuracy)
        torch.save(trainer.state_dict(), folder / f"{name}.pt")  # to go on from, after an interrupt
    print(f"{name:12} test accuracy {evaluate().accuracy:.1%} | {trainer.ledger}")
    return trainer


uniform = run("uniform", method="uniform")
print("Steps run", f"eagerly: {uniform.why_eager}" if uniform.why_eager else "as CUDA graphs")
exact = run("rho", log=folder / "chosen.jsonl")
run("annealed", schedule=rho.annealed(STEPS))  # selects early, then trains on all but the hardest
run("gate", scoring=Gate(0.5))  # half of the forward passes
run("replay", scoring=Recorded(folder / "chosen.jsonl"))  # the same choices, no scoring at all
print("RHO-LOSS against uniform:", exact.ledger.verdict(uniform.ledger))
