"""Exceptions that come between two lines, as from Ctrl-C: they arrive as they are, and later errors name them."""

import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import Interrupts, caught
from torch import nn
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch.nn.modules import module

from zero_nb import (
    activation_memory,
    convert_checkpoint,
    full_state_dict,
    newest_checkpoint,
    verify_checkpoint,
)
from zero_nb.checkpoint import checksums
from zero_nb.checkpoint import sharded as sharded_module
from zero_nb.checkpoint.async_save import AsyncCheckpointer, StagingMemory
from zero_nb.checkpoint.folder import PlainPlanner
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.checkpoint.skeleton import SkeletonFile, TensorForm, unbacked
from zero_nb.comm.agreement import agree, agreeing
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.ending import end_if_interrupted
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.store import _Notes
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

ROOM = os.sep + os.path.join("zero_nb", "checkpoint") + os.sep


def trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW)
    model(torch.ones(1, 8)).sum().backward()
    zero.step()
    return model, zero


def save(folder):
    save_sharded(folder, *trained(), 1)


def load(folder):
    load_sharded(folder, *trained())


def state_of_torch():
    """Give what holds for all of a process, and what an interrupted call might leave behind."""
    return (
        _get_dispatch_mode(_TorchDispatchModeKey.FAKE),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        len(module._global_forward_pre_hooks) + len(module._global_forward_hooks),
        torch.is_grad_enabled(),
        {*torch.serialization.get_safe_globals()},
        torch.serialization._serialization_tls.skip_data,
        torch.serialization.get_crc32_options(),
        torch.get_num_threads(),
        gc.isenabled(),
        sys.getswitchinterval(),
    )


def outcomes(action, stride, most=40, room=ROOM):
    """Interrupt an action at some of its lines; give what came out, but for interrupts, and what stayed."""
    found = []
    before = state_of_torch()
    for at in range(1, most * stride, stride):
        try:
            sys.settrace(Interrupts(at, room))
            action()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                found.append((at, repr(error)))
            if (now := state_of_torch()) != before:
                found.append((at, f"{before} is now {now}"))
            continue
        finally:
            sys.settrace(None)
        break
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "step_1"
    run(2, save, path)
    return path


@pytest.mark.parametrize("what", ("verify", "newest", "convert", "convert back"))
def test_an_interrupt_while_a_checkpoint_is_read_arrives_as_one(folder, tmp_path, what):
    plain = tmp_path / "plain.pt"
    convert_checkpoint(folder, plain)
    action = {
        "verify": partial(verify_checkpoint, folder),
        "newest": partial(newest_checkpoint, folder.parent),
        "convert": partial(convert_checkpoint, folder, tmp_path / "again.pt"),
        "convert back": partial(convert_checkpoint, plain, tmp_path / "folder"),
    }[what]
    assert outcomes(action, {"newest": 13}.get(what, 37)) == []


def test_an_interrupt_while_activations_are_counted_arrives_as_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    room = os.path.join("zero_nb", "verify") + os.sep
    activation_memory(model, [torch.ones(2, 8)])  # torch imports more, which it trusts in files
    assert outcomes(lambda: activation_memory(model, [torch.ones(2, 8)]), 1, 400, room) == []


class SkippingInterrupted(Interrupts):
    """A trace that interrupts where torch begins, or ends, to leave out the numbers of what is saved."""

    def __call__(self, frame, event, arg):
        skips = isinstance(frame.f_locals.get("self"), torch.serialization.skip_data)
        return super().__call__(frame, event, arg) if skips else None


def test_an_interrupt_while_a_skeleton_is_written_leaves_torch_with_numbers(tmp_path):
    holes = unbacked({"a": TensorForm(torch.float32, (4,), (1,))})
    before = state_of_torch()
    for at in range(1, 10):
        sys.settrace(SkippingInterrupted(at, "serialization.py"))
        try:
            SkeletonFile(tmp_path / "a.pt", holes, holes).close()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert state_of_torch() == before, at


def test_an_interrupt_while_a_checkpoint_is_loaded_arrives_as_one(folder):
    assert run(1, outcomes, partial(load, folder), 61) == [[]]


def load_interrupted(folder, rank):
    model, zero = trained()

    def interrupting(*args):
        raise KeyboardInterrupt

    if Group().group_rank == rank:
        PlainPlanner.resolve_tensor = interrupting
    try:
        load_sharded(folder, model, zero)
    except BaseException as error:
        raised = (type(error).__name__, str(error))
    if Group().group_rank == rank:
        del PlainPlanner.resolve_tensor
    load_sharded(folder, model, zero)
    return *raised, [p.tolist() for p in model.parameters()]


def test_an_interrupt_while_numbers_are_read_is_no_error_of_the_checkpoint(folder):
    names, words, values = zip(*run(2, load_interrupted, folder, 1), strict=True)
    assert names == ("RuntimeError", "KeyboardInterrupt")
    assert "KeyboardInterrupt on rank 1" in words[0] and "load again" in words[0]
    assert values[0] == values[1]


def stop_a_load(folder, place, error, sharded):
    """Let rank 0 leave a load by an exception, once the numbers are read, and wait; then load again."""
    model, zero = trained()
    optimizer = zero if sharded else torch.optim.AdamW(model.parameters())

    def leave(*args):
        raise error

    if dist.get_rank() == 0 and place == "hook":
        handle = model.register_load_state_dict_post_hook(leave)
    elif dist.get_rank() == 0:
        plain = getattr(sharded_module, place)
        setattr(sharded_module, place, leave)
    try:
        load_sharded(folder, model, optimizer)
    except BaseException as raised:
        first = f"{type(raised).__name__}: {raised}"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank():
        store.set("heard", "")
    else:
        store.wait(["heard"])  # no call of this rank's frees the others
        setattr(sharded_module, place, plain) if place != "hook" else handle.remove()
    return first, caught(lambda: load_sharded(folder, model, optimizer))


@pytest.mark.parametrize("sharded", (True, False), ids=("zero", "plain"))
@pytest.mark.parametrize("place", ("hook", "restore_keys", "gather_parameters", "in_part"))
def test_ranks_hear_at_once_of_an_interrupt_after_the_numbers_were_read(folder, place, sharded):
    if not sharded and place == "gather_parameters":
        pytest.skip("nothing is gathered")
    ours, theirs = run(2, stop_a_load, folder, place, KeyboardInterrupt, sharded)
    assert ours[0] == "KeyboardInterrupt: "
    for said in (theirs[0], ours[1], theirs[1]):
        assert f"rank 0 failed with KeyboardInterrupt at 'loading {folder}" in said, said
    assert "make a new group" in ours[1]


def test_an_error_of_a_hook_of_the_model_is_one_on_all_ranks_of_a_load(folder):
    ours, theirs = run(2, stop_a_load, folder, "hook", ValueError("no"), True)
    assert ours == ("ValueError: no", None)
    assert "rank 0 failed at loading" in theirs[0] and theirs[1] is None, theirs


def test_threads_that_check_a_folder_stop_after_an_interrupt(folder, monkeypatch):
    plain = checksums.crc32
    told = []
    maps = Path("/proc/self/maps")

    def interrupting(*args):
        in_pool = threading.current_thread() is not threading.main_thread()
        if in_pool and not told and sys._getframe(1).f_code.co_name == "crc_of":
            told.append(os.kill(os.getpid(), signal.SIGINT))
            time.sleep(0.3)  # the main thread has the exception by now
        return plain(*args)

    monkeypatch.setattr(checksums, "crc32", interrupting)
    # torch's launcher may have left its own in a test before
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            verify_checkpoint(folder)
    finally:
        signal.signal(signal.SIGINT, before)
    while maps.exists() and str(folder) in maps.read_text():  # they stop, and let go of the files
        gc.collect()
        time.sleep(0.05)
    assert told


def save_inside_a_save(folder, ranks):
    """Let a signal handler save while this rank copies what goes to another checkpoint."""
    model, zero = trained()
    saver = AsyncCheckpointer(model, zero)
    plain = StagingMemory.copy

    def copy(self, planned):
        StagingMemory.copy = plain
        if dist.get_rank() in ranks:
            signal.raise_signal(signal.SIGUSR1)
        return plain(self, planned)

    StagingMemory.copy = copy
    signal.signal(signal.SIGUSR1, lambda *_: saver.save(folder / "inner", 2))
    said = caught(lambda: saver.save(folder / "outer", 1)) or ""
    saver.save(folder / "next", 3).wait()
    return "save() of an AsyncCheckpointer was called while it was running" in said


@pytest.mark.parametrize("ranks", ((0, 1), (1,)), ids=str)
def test_a_save_in_a_signal_handler_inside_a_save_is_refused_on_all_ranks(tmp_path, ranks):
    assert run(2, save_inside_a_save, tmp_path, ranks) == [True, True]
    assert os.listdir(tmp_path) == ["next"]


def drop_a_gather():
    """Interrupt a call between the start of a gather and the wait; give what the next one says."""
    group = Group()
    group.all_gather(torch.zeros(4))
    with pytest.raises(KeyboardInterrupt):
        work = group.all_gather(torch.zeros(4), async_op=True)
        raise KeyboardInterrupt
    del work
    return caught(lambda: group.all_gather(torch.zeros(4)))


def test_the_words_for_a_dropped_collective_name_both_reasons():
    for said in run(2, drop_a_gather):
        assert "was started and never waited for" in said
        assert "as from Ctrl-C, ended the call that started it, or its Work was not kept" in said


class Stopped(Exception):
    """What a signal handler of the user's raises."""


def interrupt_at(store, place):
    """Send this process a signal once its main thread is in a function of ours; then let rank 1 come,
    which `store` keeps waiting (None: until the main thread lets it)."""
    main = threading.main_thread().ident
    names = []
    while place not in names:
        time.sleep(0.01)
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        # multiprocessing, which has forked this rank, has a `_launch` as well
        names = [c.co_name for c in codes if f"{os.sep}zero_nb{os.sep}" in c.co_filename]
    os.kill(os.getpid(), signal.SIGALRM)
    if store:
        store.set("interrupted", "")


def interrupt_asking(store):
    """Send a signal while this rank asks the store whether all have come; then let rank 1 come."""
    plain = _Notes._ask

    def ask(self, request, key, *values):
        def raising(*given):
            store.set("interrupted", "")
            signal.raise_signal(signal.SIGALRM)
            return request(*given)

        if not key.endswith("/ok"):
            return plain(self, request, key, *values)
        _Notes._ask = plain
        return plain(self, raising, key, *values)

    _Notes._ask = ask


def wait_twice(error, in_a_block):
    """Let a signal end rank 0's wait for a peer that comes later; wait two times more."""
    group = Group()
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.full((4,), 1.0 + group.group_rank)
    for given in (torch.zeros(4), torch.zeros(4), tensor):  # the first is compared at its start
        if given is tensor and group.group_rank:
            store.wait(["interrupted"])
        with coalescing_manager(group, async_ops=True) if in_a_block else nullcontext() as block:
            work = group.all_gather(given, async_op=True)
        work = block or work
        if given is not tensor or group.group_rank:
            work.wait()

    if group.group_rank:
        return tensor.tolist(), []

    def handler(*_):
        raise error

    signal.signal(signal.SIGALRM, handler)
    threading.Thread(target=interrupt_at, args=(store, "_advance"), daemon=True).start()
    with pytest.raises(error):
        work.wait()
    said = [caught(work.wait), caught(work.wait)]
    assert "all_gather" in caught(lambda: group.all_reduce(torch.zeros(1))), (
        "its messages would be mixed up"
    )
    return tensor.tolist(), said


@pytest.mark.parametrize("in_a_block", (False, True), ids=("alone", "block"))
@pytest.mark.parametrize("error", (KeyboardInterrupt, Stopped))
def test_a_wait_that_a_signal_ended_raises_when_it_is_repeated(way, error, in_a_block):
    (_, said), (other, _) = run(2, wait_twice, error, in_a_block)
    for text in said:
        assert "all_gather" in text and f"was ended by {error.__name__}" in text, text
    assert other == [1.0, 1.0, 2.0, 2.0]


def interrupt_a_step(error):
    """Let a signal end rank 0's step while it waits for what rank 1 has stepped, and go on."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW)
    store = dist.distributed_c10d._get_default_store()

    def handler(*_):
        raise error

    signal.signal(signal.SIGALRM, handler)
    for step in range(2):
        model(torch.ones(1, 8)).sum().backward()
        if step and zero.rank:
            store.wait(["interrupted"])
        if step and not zero.rank:
            waiting = threading.Thread(target=interrupt_at, args=(store, "gather_parameters"))
            waiting.start()
            with pytest.raises(error):
                zero.step()
            waiting.join()
        else:
            said = caught(zero.step)  # what rank 0 sent before it may be all that rank 1 needs
    return said if zero.rank and said else caught(zero.step)


@pytest.mark.parametrize("error", (KeyboardInterrupt, Stopped))
def test_no_rank_goes_on_after_a_step_that_a_signal_ended(way, error):
    for said in run(2, interrupt_a_step, error, timeout=60):
        assert f"rank 0 failed with {error.__name__}" in said, said


def go_on_after(kind, async_op):
    """Let a signal end rank 0's collective, and call three more on all ranks."""
    group = Group()
    store = dist.distributed_c10d._get_default_store()

    def call(async_op=False):
        getattr(group, kind)(torch.ones(2 * group.size), async_op=async_op).wait()

    def handler(*_):
        raise KeyboardInterrupt

    call()
    call()
    if group.group_rank:
        store.wait(["interrupted"])
        caught(call)  # what rank 0 sent may be all that it needs
    else:
        signal.signal(signal.SIGALRM, handler)
        place = "_advance" if async_op else "_launch"
        threading.Thread(target=interrupt_at, args=(store, place), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            call(async_op)
    return [caught(call) or "no error" for _ in range(3)]


@pytest.mark.turns(2)
@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("async_op", (False, True), ids=("sync", "async"))
@pytest.mark.parametrize("kind", ("all_gather", "reduce_scatter"))
def test_no_collective_of_a_group_runs_after_one_that_a_signal_ended(way, kind, async_op, size):
    for said in run(size, go_on_after, kind, async_op):
        for text in said:
            assert f"rank 0 failed with KeyboardInterrupt in {kind}" in text, said


def forget_on_one_rank():
    """Keep no `Work` on rank 0; the others wait for theirs."""
    group = Group()
    for _ in range(2):
        group.all_gather(torch.zeros(4 * group.size))
    work = group.all_gather(torch.ones(4 * group.size), async_op=True)
    if group.group_rank:
        caught(work.wait)  # by messages rank 0 may be gone by then
    del work
    return [caught(lambda: group.all_gather(torch.ones(4 * group.size))) for _ in range(3)]


@pytest.mark.parametrize("size", (2, 3))
def test_no_collective_of_a_group_runs_after_one_that_one_rank_has_forgotten(way, size):
    for said in run(size, forget_on_one_rank):
        for text in said:
            assert text and "all_gather of" in text and "never waited for" in text, said


class Left(BaseException):
    """What a signal handler of the user's raises to leave a program."""


def leave_by(error, ranks, place):
    """Leave an agreement by an exception on some ranks; give what each rank raised, and what comes then."""
    group = Group()
    group.all_gather(torch.zeros(group.size))
    leaves = group.group_rank in ranks

    def leave():
        if leaves:
            raise error
        if place == "between":
            group.all_gather(torch.zeros(group.size))

    block = {
        "local": lambda: agreeing(group, "the work", local=True),
        "block": lambda: agreeing(group, "the work"),
        "between": lambda: end_if_interrupted(group, "the work"),
    }[place]
    with pytest.raises(error if leaves else RuntimeError) as raised, block():
        leave()
    summed = torch.ones(1)
    said = caught(lambda: agree(group, "the next")) or caught(lambda: group.all_reduce(summed))
    return str(raised.value), said or summed.item()


@pytest.mark.parametrize("ranks", ((0,), (1,), (0, 1, 2)), ids=str)
@pytest.mark.parametrize("error", (KeyboardInterrupt, SystemExit, Left))
@pytest.mark.parametrize("place", ("local", "block", "between"))
def test_ranks_hear_of_one_that_leaves_an_agreement_by_no_error(place, error, ranks):
    found = run(3, leave_by, error, ranks, place)
    for rank, (said, then) in enumerate(found):
        words = f"failed with {error.__name__} at 'the work'"
        if (
            place != "between"
        ):  # there they are in a collective, which may end before they read the words
            assert rank in ranks or words in said, found
        assert then == 3.0 if place == "local" else words in then, found


@pytest.mark.parametrize("asking", (False, True))
@pytest.mark.parametrize("error", (KeyboardInterrupt, RuntimeError, TimeoutError, Stopped))
def test_ranks_hear_of_one_that_was_interrupted_while_it_waited_for_them(error, asking):
    # a RuntimeError is what torch raises in a rank whose DataLoader has lost a worker
    found = run(2, wait_interrupted, error, asking)
    assert found[0] == (error.__name__, 2.0)
    assert f"rank 0 failed with {error.__name__} at 'the work'" in found[1][0]
    assert found[1][1] == 2.0


def wait_interrupted(error, asking):
    """Let a signal end rank 0's wait in an agreement before rank 1 comes."""
    group = Group()
    group.all_reduce(torch.ones(1))
    store = dist.distributed_c10d._get_default_store()

    def handler(*_):
        raise error

    if group.group_rank:
        store.wait(["interrupted"])
    else:
        signal.signal(signal.SIGALRM, handler)
        if asking:
            interrupt_asking(store)
        else:
            threading.Thread(target=interrupt_at, args=(None, "agree"), daemon=True).start()
    try:
        agree(group, "the work")
    except (error, RuntimeError) as raised:
        said = str(raised) or type(raised).__name__
        # not before: the handler may be late, and find that all have agreed
        store.set("interrupted", "")
    summed = torch.ones(1)
    group.all_reduce(summed)
    return said, summed.item()


def save_again(folder, form, places):
    """Interrupt a save on all ranks, at a line that differs, and save again, in one group for each place."""
    found = []
    for at in places:
        group = dist.new_group(timeout=timedelta(seconds=30))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, group)
        model(torch.ones(1, 8)).sum().backward()
        zero.step()
        saver = AsyncCheckpointer(model, zero, group)
        save = {
            "sharded": lambda path: save_sharded(path, model, zero, process_group=group),
            "async": lambda path: saver.save(path) and saver.wait(),
            "full": lambda path: full_state_dict(zero, path.with_suffix(".pt")),
        }[form]
        try:
            sys.settrace(Interrupts(at, os.sep + "zero_nb" + os.sep))
            save(folder / f"{at}")
        except (KeyboardInterrupt, Exception):
            pass
        finally:
            sys.settrace(None)
        # in the first, gloo may lose a message that meets a closed connection
        begin = time.monotonic()
        said = caught(lambda: save(folder / f"{at} again"))
        found.append((at, said, time.monotonic() - begin))
        dist.barrier()
    return found


@pytest.mark.turns(3)
@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("form", ("sharded", "async", "full"))
def test_a_save_after_an_interrupted_one_works_or_fails_on_all_ranks_at_once(
    way, form, size, tmp_path
):
    found = run(size, save_again, tmp_path, form, range(211, 12000, 997), timeout=200)
    for ranks in zip(*found, strict=True):
        assert len({said is None for _, said, _ in ranks}) == 1, ranks
        assert max(seconds for *_, seconds in ranks) < 20, ranks
        # another rank may notice first that the interrupted one is gone, and fail in its words
        assert all(said is None or "failed with" in said for _, said, _ in ranks), ranks
