"""Two processes on one machine, against one process with the whole batch."""

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vicinal
from small_models import vit

RATE = 0.1


def step(model, x):
    """One step of SGD on half of the loss's sum: two processes that average gradients then make the whole."""
    loss = model(x).square().sum() / len(x)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad


def data_parallel(model, x):
    step(nn.parallel.DistributedDataParallel(model), x)
    return dict(model.named_parameters())


def fully_sharded(model, x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model, x)
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def work(rank, port, model, x, expected):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for way in (data_parallel, fully_sharded):  # starting the processes takes most of the time
        got = way(copy.deepcopy(model), x.chunk(2)[rank])  # the one that was passed is shared by both processes
        for name, value in expected.items():
            message = f"{way.__name__}: {name}"
            torch.testing.assert_close(got[name].detach(), value, atol=1e-5, rtol=1e-4, msg=message)
    dist.barrier()  # the group goes with the process: to free it earlier may wait for ever, see steps_of_a_process.py


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_train_as_one_in_copies_and_in_shards():
    torch.manual_seed(0)
    model = vit(num_heads=2, global_pool="avg")  # behind a class token the last prior would have no say
    for module in model.modules():  # weights of the size of 1, so that a step moves everything
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    vicinal.attach(model, "gmm:init=spread+gab")
    x = torch.randn(4, 3, 32, 32)
    alone = copy.deepcopy(model)
    step(alone, x)
    expected = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    priors = [name for name in expected if ".prior." in name]
    assert priors
    assert all(not torch.equal(expected[name], model.state_dict()[name]) for name in priors)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, model, x, expected), nprocs=2)
