"""A run of each loop on two processes: `ranks_loops.py LOOP FOLDER`; each rank writes what it chose."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fixtures_integrations import KEEP, LEARNING_RATE, ROWS, TRAINED, Classifier, points, recorded
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss.distributed import leave
from rholoss.errors import RholossError

CANDIDATES = round(TRAINED / KEEP) // 2  # of each rank


def indexed():
    return rho.WithIndex(TensorDataset(*points()))


def loader():
    return DataLoader(indexed(), batch_size=CANDIDATES, shuffle=True)


def lightning(select, net, own_batches=False, watched=False, deal=True):
    import lightning as L

    from rholoss.integrations.lightning import RhoCallback

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

        def train_dataloader(self):  # called when the ranks are there
            batches = loader()
            if own_batches:
                own = select.batch_sampler(indexed(), CANDIDATES)
                batches = DataLoader(indexed(), batch_sampler=own)
            return select.watch(batches) if watched else batches

    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", callbacks=[RhoCallback(select)],
        accumulate_grad_batches=2, use_distributed_sampler=deal, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module())


def lightning_batches(select, net):
    lightning(select, net, own_batches=True, deal=False)


def lightning_batches_watched(select, net):
    lightning(select, net, own_batches=True, watched=True)


def lightning_dealt_twice(select, net):
    try:
        lightning(select, net, own_batches=True)
    except RholossError as error:
        return {"error": str(error)}


def lightning_watched(select, net):
    try:
        lightning(select, net, watched=True)
    except RholossError as error:
        return {"error": str(error)}


def fabric(select, net):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE))
    batches = fabric.setup_dataloaders(loader())
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for step, candidates in enumerate(batches):
            _, x, y = select(net, candidates)
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                fabric.backward(F.cross_entropy(model(x), y) / 2)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()


def accelerate(select, net):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE), loader()
    )
    for _ in range(2):
        for candidates in batches:
            with accelerator.accumulate(model):
                _, x, y = select(model, candidates)
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def huggingface(select, net, streamed=False):
    from fixtures_integrations import Rows
    from transformers import TrainerCallback, TrainingArguments

    from rholoss.integrations.huggingface import RhoTrainer

    def read(shard):
        return ({**Rows()[row], "name": row} for row in range(shard, ROWS, 8))

    logged = []  # lines of this rank's log, whenever a checkpoint was written

    class Saved(TrainerCallback):
        def on_save(self, *_, **__):
            path = select.ranks.own_path(select.log.path.parent / "log.jsonl")
            logged.append(len(path.read_text().splitlines()) if path.exists() else 0)

    train = rho.Stream(range(8), read, key="name", shuffle=True) if streamed else Rows()
    more = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2} if streamed else {}
    model = Classifier()
    model.net = net
    settings = TrainingArguments(
        "out", per_device_train_batch_size=TRAINED // 2, num_train_epochs=2,
        gradient_accumulation_steps=2, use_cpu=True, ddp_backend="gloo", report_to=[],
        disable_tqdm=True, max_grad_norm=0.0, ddp_find_unused_parameters=False,
        **{"save_strategy": "no", **more},
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = RhoTrainer(
        model, settings, train_dataset=train, optimizers=(optimizer, constant), selector=select,
        callbacks=[Saved()],
    )  # fmt: skip
    metrics = trainer.train().metrics
    rows = metrics["train_samples_per_second"] * metrics["train_runtime"]
    return {"rows": rows, "logged": logged}


def huggingface_stream(select, net):
    return huggingface(select, net, streamed=True)


def main(name, folder):
    loops = (
        lightning,
        lightning_batches,
        lightning_batches_watched,
        lightning_dealt_twice,
        lightning_watched,
        fabric,
        accelerate,
        huggingface,
        huggingface_stream,
    )
    run = {loop.__name__: loop for loop in loops}[name]
    select, seen = recorded(log=folder / "log.jsonl")  # before the ranks know of each other
    net = Classifier().net
    told = run(select, net) or {}
    select.flush()
    result = {
        "candidates": [index.tolist() for index in seen.candidates],
        "chosen": seen.chosen,
        "log": select.log.path.name,
        "weights": net.state_dict(),
        **told,
    }
    torch.save(result, folder / f"rank{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
