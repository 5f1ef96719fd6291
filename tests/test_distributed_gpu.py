"""Two processes on one GPU choose as one does; SyncBatchNorm sees the candidates of both; FSDP2."""

import pytest
import ranks_task as task
import torch
import torch.distributed as dist
from ranks_run import launch

import rholoss as rho

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("ranks_gpu.py", 2, tmp_path_factory.mktemp("ranks"))


def test_the_global_choice_on_a_gpu_is_that_of_one_process(found):
    model = task.network().cuda()
    select = rho.Selector("rho", irreducible=task.problem()[2], keep=0.1)
    chosen = task.train(model, select, [task.rows_of(step, 2) for step in range(task.STEPS)])
    for step in range(task.STEPS):
        both = torch.cat([result["chosen"][step] for result in found["global_ddp"]])
        assert sorted(both.tolist()) == sorted(chosen[step].tolist())
    for result in found["global_ddp"]:
        for ours, theirs in zip(result["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach().cpu(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["train", "batch", "eval"])
def test_synchronised_batch_norm_sees_the_candidates_of_all_ranks(found, mode):
    model = task.network(norm=True).cuda().train()
    _, x, y = (part.cuda() for part in task.batch_of(task.rows_of(0, 2)))
    loss = rho.Scorer(batch_norm=mode).measure(model, (x, y), len(y), frozenset({"loss"}))["loss"]
    both = torch.cat([result[mode][0] for result in found["synchronised_norm"]])
    torch.testing.assert_close(both, loss.cpu(), rtol=0, atol=1e-5)
    for result in found["synchronised_norm"]:
        torch.testing.assert_close(result[mode][1], model[1].running_mean.cpu(), rtol=0, atol=1e-5)


def test_fsdp_on_a_gpu_is_sharded_after_scoring():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = task.network().cuda()
        fully_shard(model[0])
        fully_shard(model)
        plain = task.network().cuda()
        select, other = (
            rho.Selector("rho", irreducible=task.problem()[2], keep=0.1) for _ in range(2)
        )
        for step in range(3):
            candidates = task.batch_of(task.rows_of(step, 1))
            chosen = select(model, candidates)[0]
            assert all(isinstance(p, DTensor) for p in model.parameters())
            assert chosen.tolist() == other(plain, candidates)[0].tolist()
    finally:
        dist.destroy_process_group()
