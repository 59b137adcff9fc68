"""Who reads parameters on their way: loaders, children, threads, and what follows an exception."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from common import caught, flatten
from common.parallel import MODES, SMALL, base, batch
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Reading(Dataset):
    """Gives what it sees of a model, through its modules and past them."""

    def __init__(self, model):
        self.model, self.kept = model, list(model.parameters())

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.stack(
            [
                flatten(self.model.parameters()),
                flatten(self.kept),
                flatten(self.model.state_dict().values()),
            ]
        )


def loaded(setup):
    """Start workers that read the model as soon as backward has returned."""
    torch.manual_seed(0)
    model = base()
    data_parallel(
        model,
        zero := ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05, foreach=False),
        **SMALL,
        **setup,
    )
    dataset, right = Reading(model), []
    for i in range(4):
        model(batch(i)).square().mean().backward()
        rows = torch.cat(
            list(
                DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
            )
        )
        right.append(torch.equal(rows, flatten(model.parameters()).expand_as(rows)))
        zero.step()
    return right


@pytest.mark.turns(3)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", MODES)
def test_M3_workers_of_a_loader_read_the_parameters_after_the_step(mode):
    assert run(2, loaded, MODES[mode], timeout=60) == [[True] * 4] * 2


def hidden_model(**setup):
    torch.manual_seed(0)
    model = base()
    handle = data_parallel(
        model,
        ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05),
        hidden=True,
        **SMALL,
        **setup,
    )
    for i in range(3):
        model(batch(i)).square().mean().backward()
    return model, handle


def in_child(f):
    """Call a function in a forked process; what it returns, as text."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writing, str(f()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as file:
        return file.read().decode()


def forked():
    model, handle = hidden_model()
    assert not handle.arriving.done, "some parameters are on their way"
    seen = in_child(lambda: float(flatten(model.parameters()).sum()))
    return seen == str(float(flatten(model.parameters()).sum())), handle.arriving.done


def test_M3_a_process_waits_for_its_parameters_before_it_forks():
    assert run(2, forked) == [(True, True)] * 2


def forked_all_the_same():
    model, handle = hidden_model()
    pending = handle.arriving
    handle.arriving = None  # as if a fork had come between
    before = in_child(
        lambda: setattr(handle, "arriving", pending) or caught(lambda: model[0].weight)
    )
    handle.arriving = pending
    return before, replicas(model)


def replicas(model):
    mine = flatten(model.parameters())
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def test_M3_a_child_that_is_forked_between_raises_at_once():
    for words, equal in run(2, forked_all_the_same, timeout=30):
        assert (
            words.startswith("RuntimeError: process ")
            and "was forked while parameters" in words
            and "call handle.wait() before you fork" in words
        )
        assert equal


def threads():
    """Four threads read all parameters at once, in different orders."""
    return [threads_once(bool(i % 2)) for i in range(8)]


def threads_once(early):
    model, handle = hidden_model(interleaved=early)
    seen, barrier = [], threading.Barrier(4)

    def read(order):
        barrier.wait()
        for layer in order:
            list(layer.parameters())
        seen.append(flatten(model.parameters()))

    every = [
        threading.Thread(target=read, args=(order,))
        for order in (list(model), list(model)[::-1], [model[2], model[0]], [])
    ]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    return (
        len(seen) == 4
        and all(torch.equal(a, seen[0]) for a in seen)
        and replicas(model)
        and handle.arriving.done
    )


def test_H1_several_threads_may_read_parameters_on_their_way():
    assert run(2, threads, timeout=60) == [[True] * 8] * 2


def interrupted():
    """End a wait with an error: later ones must not take parameters that never came."""
    model, handle = hidden_model()

    class Broken:
        done = False

        def wait(self):
            raise KeyboardInterrupt

    works = handle.arriving.works
    handle.arriving.works = [works[0], Broken(), *works[2:]]
    try:
        list(model.parameters())
    except KeyboardInterrupt:
        pass
    else:
        return "nothing was raised"
    words = [caught(lambda: flatten(model.parameters())), caught(handle.wait)]
    for work in works:
        work.wait()
    dist.barrier()  # a forward that fails ends what other ranks are waiting for
    return [*words, caught(lambda: model(batch(9)))]


def test_H1_after_an_exception_parameters_that_never_came_are_not_read():
    for words in run(2, interrupted):
        assert all(
            "some parameters never arrived on this rank: waiting for them ended with"
            " KeyboardInterrupt()" in said
            for said in words
        ), words
