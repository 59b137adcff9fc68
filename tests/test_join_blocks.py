"""Join: what may be joined, by which policy, and what is left when a block ends, in whatever way."""

import copy
import pickle
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten, largest_gap
from common.joining import (
    Own,
    alone,
    batches,
    network,
    optimizer_of,
)
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.algorithms.join import JoinHook as TorchHook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from zero_nb.comm.group_store import _has_aborted
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.ranks import Ranks
from zero_nb.join.attendance import Attendance
from zero_nb.join.event_feed import EventStore
from zero_nb.join.event_log import EventLog
from zero_nb.join.failure_detection import explain_wait
from zero_nb.join.join import Join
from zero_nb.join.participants import Joinable, JoinHook
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Counter(TorchJoinable):
    """The joinable of torch's tutorial: counts inputs over all ranks."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group or dist.group.WORLD
        self.count, self.total = torch.zeros(1), torch.zeros(1)
        self.seen = []

    def __call__(self):
        work = TorchJoin.notify_join_context(self)
        if work is not None:
            work.wait()
        self.count += 1
        total = torch.ones(1)
        dist.all_reduce(total, group=self.group)
        self.total += total

    def join_hook(self, **kwargs):
        counter = self
        counter.seen.append(kwargs)

        class Hook(TorchHook):
            def main_hook(self):
                dist.all_reduce(torch.zeros(1), group=counter.group)

            def post_hook(self, is_last_joiner):
                counter.seen.append(is_last_joiner)
                common = torch.tensor([dist.get_rank() if is_last_joiner else -1])
                dist.all_reduce(common, dist.ReduceOp.MAX, group=counter.group)
                dist.broadcast(counter.total, common.item(), group=counter.group)

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group


def count(kind, lengths, **options):
    counter = Counter()
    joining = kind([counter], sync_max_count=True, **options)
    with joining:
        for _ in range(lengths[dist.get_rank()]):
            counter()
    return counter.total.item(), counter.seen


@pytest.mark.parametrize("lengths", [(1, 5, 0), (3, 3), (0, 0)], ids=str)
def test_a_joinable_as_torchs_tutorial_writes_it(lengths):
    torchs, ours = (run(len(lengths), count, kind, lengths) for kind in (TorchJoin, Join))
    assert ours == torchs
    assert all(
        total == sum(lengths) and seen == [{"sync_max_count": True}, n == max(lengths)]
        for (total, seen), n in zip(ours, lengths, strict=True)
    )


class Ours(Joinable):
    """Says what it does by our names, and is joined by torch's class as well."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1)

    def __call__(self, x=1.0):
        Join.notify_join_context(self)
        x = torch.tensor([x])
        dist.all_reduce(x)
        self.total += x

    def join_hook(self, **kwargs):
        joinable = self

        class Hook(JoinHook):
            def main_hook(self):
                joinable(0.0)

        return Hook()

    join_device = property(lambda self: torch.device("cpu"))
    join_process_group = property(lambda self: dist.group.WORLD)


def together():
    """Join one of the user's, a silent one, a model, and an optimizer."""
    rank, order = dist.get_rank(), []
    model, mine = DDP(network()), Ours()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)

    class Silent(TorchJoinable):
        announces_iterations = False

        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs):
            class Hook(JoinHook):
                def main_hook(self):
                    order.append(model.module[0].weight.grad.norm().item() > 0)

            return Hook()

        join_device, join_process_group = Ours.join_device, Ours.join_process_group

    silent = Silent()
    with Join([model, silent, optimizer, mine]):
        for x in batches((1, 4)[rank]):
            optimizer.zero_grad()
            mine(1.0)
            model(x).square().mean().backward()
            optimizer.step()
    return flatten(model), mine.total.item(), order


def test_joinables_that_say_nothing_follow_those_that_do():
    ranks = run(2, together)
    assert all(
        largest_gap(params, alone((1, 4), "world_size", (4, 4))) < 1e-6 and total == 5
        for params, total, _ in ranks
    )
    assert (
        ranks[0][2] == [True] * 3 and ranks[1][2] == []
    )  # the gradients are there when the one after the model is called


def undeclared():
    """Join one that announces nothing and does not say so."""
    model = DDP(network())

    class Undeclared(TorchJoinable):
        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs):
            return JoinHook()

        join_device, join_process_group = Ours.join_device, Ours.join_process_group

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Join([model, Undeclared()]):
            for x in batches(dist.get_rank()):
                model(x).sum().backward()
    return [str(w.message) for w in warned if "announces_iterations" in str(w.message)]


def test_a_joinable_that_says_nothing_is_named_where_it_had_data():
    without_data, (message,) = run(2, undeclared)
    assert without_data == []
    assert "joinable 1, a Undeclared, announced nothing in 1 iterations" in message


def refusals():
    model, counter = DDP(network()), Counter()
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)

    class Forgot(Ours):
        def __init__(self):
            pass

    class Mute(TorchJoinable):
        announces_iterations = False

        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs):
            return JoinHook()

        join_device = property(lambda self: torch.device("cpu"))
        join_process_group = property(lambda self: dist.group.WORLD)

    other = dist.new_group()
    return [
        caught_error(lambda: Join([])),
        caught_error(lambda: Join([model, Counter(other)])),
        caught_error(lambda: Join([Forgot()])),
        caught_error(lambda: Join([object()])),
        caught_error(lambda: Join([model, model])),
        caught_error(lambda: Join([Mute()])),
        caught_error(lambda: Join([zero], divide_by="samples")),
        caught_error(lambda: Join([model], divide_by="batches")),
        caught_error(lambda: Join([model], policy="go on")),
        caught_error(lambda: Join([counter, network()])),
        caught_error(lambda: TorchJoin([model, Counter(other)])),
    ]


def test_what_join_refuses():
    for errors in run(2, refusals):
        kinds = [error[0] for error in errors]
        assert kinds == ["ValueError", "ValueError", "AssertionError", "TypeError"] + [
            "ValueError"
        ] * 5 + ["TypeError", "ValueError"]
        words = [
            "at least one joinable",
            "multiple process groups",
            "constructor",
            "object",
            "once",
            "notify_join_context",
            "DistributedDataParallel",
            "samples",
            "shadow",
            "Sequential",
            "multiple process groups",
        ]
        assert all(word in error[1] for word, error in zip(words, errors, strict=True))


def mistyped():
    model = DDP(network())

    class Own(Joinable):
        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs):
            return JoinHook()

        join_device = property(lambda self: torch.device("cpu"))
        join_process_group = property(lambda self: dist.group.WORLD)

    return [
        caught_error(lambda: Join([model, AdamW(model.parameters())], weights="samples")),
        caught_error(lambda: Join([model], divide_by_initial_world_size=False)),
        caught_error(lambda: Join([model, Own()], weights="samples")),
    ]  # a user's own hook may take anything


def test_an_argument_that_nobody_takes_is_refused():
    for wrong, fine, own in run(2, mistyped):
        assert (
            wrong[0] == "TypeError"
            and "'weights'" in wrong[1]
            and "divide_by" in wrong[1]
            and fine is own is None
        )


def unfollowed(how):
    between = {"norm": [nn.SyncBatchNorm(9)]}.get(how, [])
    model = DDP(network())
    if between:
        model.module.add_module("1", between[0])
    if how == "hook":
        model._register_buffer_comm_hook(None, lambda *_: None)

    def train():
        with Join([model]):
            pass

    return caught_error(train)


@pytest.mark.parametrize(("how", "words"), [("norm", "SyncBatchNorm '1'"), ("hook", "buffer hook")])
def test_what_cannot_be_shadowed_is_refused_on_entry(how, words):
    for error in run(2, unfollowed, how):
        assert error[0] == "ValueError" and words in error[1] and "policy='stop'" in error[1]


def disagree(how):
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    if how == "lr":
        optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    first = dist.get_rank() == 0

    def train():
        with Join(
            [optimizer, model] if how == "joinables" and first else [model, optimizer],
            policy="stop" if how == "policy" and first else "shadow",
        ):
            pass

    return caught_error(train)


@pytest.mark.parametrize("how", ["lr", "joinables", "policy"])
def test_ranks_that_disagree_are_told(how):
    for error in run(2, disagree, how):
        assert error[0] == "ValueError" and "entering Join" in error[1]


def quiet(kind):
    """Compare filters, configurations and hooks before and after."""
    model = DDP(network(nn.BatchNorm1d(9)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    plain = SGD(model.parameters(), lr=0.1)

    synced = (
        "forward_sync_buffers" if hasattr(model, "forward_sync_buffers") else "broadcast_buffers"
    )  # older torch

    def state():
        return (
            model._join_config,
            optimizer._join_config,
            getattr(model, synced),
            len(model._forward_hooks),
            len(model._forward_pre_hooks),
            len(plain._optimizer_step_pre_hooks),
            len(plain._optimizer_step_post_hooks),
            model.require_forward_param_sync,
        )

    before, filters = state(), list(warnings.filters)
    joinables = [model, optimizer, plain] if kind is Join else [model, optimizer]
    for _ in range(2):
        with kind(joinables):
            for x in batches(1 + dist.get_rank()):
                model(x).sum().backward()
                optimizer.step()

    def fails():
        with kind(joinables):
            for x in batches(1):
                model(x).sum().backward()
            raise KeyError("mine")

    error = caught_error(fails)
    return state() == before, warnings.filters == filters, error


def test_nothing_is_left_behind():
    assert run(2, quiet, Join) == [(True, True, ("KeyError", "'mine'"))] * 2
    assert all(not same or not filters for same, filters, _ in run(2, quiet, TorchJoin))


def copied():
    model = DDP(network())
    counter = Counter()
    with Join([model, counter]):
        inside = (
            pickle.loads(pickle.dumps(counter._join_config)),
            copy.deepcopy(counter._join_config),
        )
    return [config.enable or config.is_first_joinable for config in inside], type(
        inside[0]
    ).__name__


def test_a_copy_is_not_in_the_block():
    assert run(2, copied) == [([False, False], "_JoinConfig")] * 2


def disabled():
    model, counter = DDP(network()), Counter()
    bar = mock.Mock()
    with Join([model, counter], enable=False) as join:
        for x in join.loader(batches(2), progress=lambda total: [bar.begin(total), bar][1]):
            model(x).sum().backward()
            counter()
    return counter.total.item(), join.attendance, model._join_config.enable, str(bar.method_calls)


def test_it_can_be_switched_off():
    bar = str([mock.call.begin(2), mock.call.update(1), mock.call.update(1), mock.call.close()])
    assert run(2, disabled) == [(4, None, False, bar)] * 2


def skewed():
    counter, heard = Counter(), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Join([counter]):
            for _ in range(1 + 1003 * dist.get_rank()):
                counter()
        heard = [str(w.message) for w in warned if "skew" in str(w.message)]
    return heard, counter.total.item()


def test_skew_is_told_once():
    (heard, total), other = run(2, skewed)
    assert (
        len(heard) == 1
        and "greater than 1000" in heard[0]
        and "rank 0" in heard[0]
        and total == 1005
        and other == ([], 1005)
    )


def reads():
    """Follow a rank that announces 300 events and waits for nobody."""
    log = EventLog(EventStore(Ranks(), "test"))
    log.announce_from(0)
    if dist.get_rank() == 0:
        for i in range(300):
            log.append(0, "hook", i, {})
        log.prune()
        log.depart()
        return None
    log.feed.waiting_since = time.monotonic() - 2
    log.depart()
    while not (said := explain_wait(log)):
        pass
    log.feed.interrupt(log.number, said)
    return caught_error(log.next)


def test_a_rank_that_lags_too_far_is_told():
    assert "more than 128 events ahead" in run(2, reads)[1][1]


def notes_left(known):
    from zero_nb.comm.store import _store

    model = DDP(network())
    keys = []
    for _ in range(4):
        with Join([model], divide_by="samples") as join:
            for x in (join.loader if known else iter)(batches(1 + 3 * dist.get_rank())):
                model(x).sum().backward()
        dist.barrier()
        keys.append(_store(Group()).num_keys())
        dist.barrier()
    return keys[-1] - keys[0]


@pytest.mark.parametrize("known", [True, False])
def test_the_store_does_not_fill_up(known):
    assert run(2, notes_left, known) == [0, 0]


def nested():
    rank = dist.get_rank()
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    rolls = []

    def train(n, first=0):
        for x in batches(n + first)[first:]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with Join([model, optimizer]) as outer:
        train(2)
        assert caught_error(outer.__enter__) == (
            "RuntimeError",
            "this Join block is running; make another one to nest",
        )
        for _ in range(2):
            with Join([optimizer, model], divide_by="active") as inner:
                train(1 + rank)
            rolls.append(inner.attendance.batches)
        train(1 + 2 * rank)
    again = outer
    with again:
        train(2 - rank)
    return flatten(model), rolls, again.attendance.batches


def test_blocks_may_be_nested_and_entered_again():
    ranks = run(2, nested)
    assert largest_gap(ranks[0][0], ranks[1][0]) == 0 and all(
        rolls == [(1, 2)] * 2 and again == (2, 1) for _, rolls, again in ranks
    )


def policies(policy, counts, how="plain", throw=False):
    """Train by a policy; what is raised, how many iterations were done, and where."""
    rank = dist.get_rank()
    model = DDP(network(nn.BatchNorm1d(9)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    join, done, mine = (
        Join([model, optimizer], throw_on_early_termination=throw, policy=policy),
        [],
        batches(counts[rank]),
    )

    def train():
        with join:
            for x in {
                "plain": lambda: mine,
                "loader": lambda: join.loader(mine),
                "stream": lambda: join.loader(iter(mine)),
            }[how]():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                done.append(1)

    error = caught_error(train)
    model(torch.ones(2, 6))  # nothing is sent but buffers, and all ranks are here
    return error, len(done), join.attendance, flatten(model)


@pytest.mark.parametrize("counts", [(1, 5, 0), (3, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("how", ["plain", "loader", "stream"])
def test_all_stop_with_the_shortest(counts, how):
    few = min(counts)
    dropped = tuple(
        n - few if how == "loader" else int(n > few) for n in counts
    )  # a rank that is asked knows of one
    for error, done, roll, params in (ranks := run(len(counts), policies, "stop", counts, how)):
        assert (
            error is None
            and done == few
            and roll == Attendance((few,) * len(counts), dropped)
            and largest_gap(params, ranks[0][3]) == 0
        )


def left_at_once():
    """Let one rank take long to begin; meanwhile the others say how many batches they have, and the
    one without any leaves."""
    rank, model = dist.get_rank(), DDP(network())
    join, done = (
        Join([model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)], policy="stop"),
        [],
    )

    def train():
        with join:
            time.sleep(0.5 * (rank == 0))
            for x in join.loader(iter(batches((1, 5, 0)[rank]))):
                model(x).square().mean().backward()
                done.append(1)

    return caught_error(train), len(done)


def test_who_leaves_at_once_has_called_the_loader():
    assert run(3, left_at_once) == [(None, 0)] * 3


@pytest.mark.parametrize("how", ["plain", "loader", "stream"])
@pytest.mark.parametrize("throw", [True, False])
def test_all_raise_with_the_shortest(how, throw):
    ranks = run(3, policies, None if throw else "raise", (2, 4, 2), how, throw)
    for rank, (error, done, _, _) in enumerate(ranks):
        assert error[0] == "RuntimeError" and done == (0 if how == "loader" else 2)
        torchs = (
            "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            if rank == 1
            else f"Rank {rank} exhausted all inputs."
        )
        assert ("2, 4, 2" if how == "loader" else torchs) in error[1]
    assert all(
        error is None and done == 3 for error, done, _, _ in run(2, policies, "raise", (3, 3), how)
    )


def misused(how):
    rank, model = dist.get_rank(), DDP(network())

    def train():
        with Join([model], divide_by="samples") as join:
            if how == "skipped" and rank == 1:
                return
            for k, x in enumerate(join.loader(DataLoader(torch.cat(batches(4)), batch_size=4))):
                if how == "halves":
                    x = x[:2]
                if how == "left" and rank == 1 and k == 1:
                    break
                model(x).square().mean().backward()
            if how == "twice":
                next(join.loader([1]))

    return caught_error(train)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("skipped", "RuntimeError", "without calling join.loader()"),
        ("halves", "ValueError", "whole batches"),
        ("twice", "RuntimeError", "one loop"),
        ("left", "RuntimeError", "left its loop after 2 of 4 batches"),
    ],
)
def test_a_loader_that_is_misused(how, kind, words):
    errors = run(2, misused, how)
    assert all(error is not None for error in errors) and any(
        error[0] == kind and words in error[1] for error in errors
    ), errors


def fails(how, kind="ours", seconds=100):
    """Raise in one rank's loop; what each rank is told, how long it took, and which ranks note that
    they have closed their connections and live on."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    model = DDP(network(), process_group=group)
    optimizer = optimizer_of(kind, model.parameters(), group)

    def train():
        with Join([model, optimizer], divide_by="samples"):
            for k, x in enumerate(batches((2, 6, 6)[rank])):
                optimizer.zero_grad()
                if k == 3 and (how == "all" or rank == 2):
                    if how == "consolidate":
                        optimizer.consolidate_state_dict()
                    if how == "nested":
                        with Join([model, optimizer]):
                            pass
                    raise Own(f"in the data of rank {rank}")
                if how in ("consolidate", "nested") and k == 3:
                    if how == "consolidate":
                        optimizer.consolidate_state_dict()
                    with Join([model, optimizer]):
                        pass
                model(x).square().mean().backward()
                optimizer.step()

    begin = time.monotonic()
    error = caught_error(train)
    took = time.monotonic() - begin
    dist.barrier()  # the job's own group is whole
    noted = [_has_aborted(Group(group), other) for other in range(3)]
    return error, took, model._join_config.enable, len(model._forward_hooks), noted


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_an_error_in_one_loop_reaches_all_ranks(kind):
    ranks = run(3, fails, "one", kind)
    assert ranks[2][0] == ("Own", "in the data of rank 2") and ranks[2][1] < 50
    for error, took, left, hooks, noted in ranks[:2]:
        assert (
            error[0] == "RuntimeError"
            and "rank 2 left the Join block after 3 iterations: Own: in the data of rank 2"
            in error[1]
        )
        assert took < 50 and not left and not hooks  # long before the group's time limit
        # those that were in a collective; another one has heard of the error first, and left
        assert any(noted[:2]) and not noted[2]


def test_an_error_on_all_ranks_with_data_is_theirs():
    ranks = run(3, fails, "all")
    assert [error[0] for error, *_ in ranks] == ["RuntimeError", "Own", "Own"]


@pytest.mark.parametrize(
    ("how", "words"),
    [("consolidate", "consolidate_state_dict"), ("nested", "entered a Join block inside")],
)
def test_what_ranks_without_data_cannot_follow_is_an_error(how, words):
    ranks = run(3, fails, how)
    assert all(error[0] == "RuntimeError" and took < 50 for error, took, *_ in ranks) and any(
        words in error[1] for error, *_ in ranks
    ), ranks
