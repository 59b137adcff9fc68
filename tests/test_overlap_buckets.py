"""The step inside DDP's backward: its plan of buckets, its memory, and what it reads from a GPU."""

from datetime import timedelta
from importlib import import_module
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from common.afresh import measures_memory
from common.ddp_training import CAP, Net, apart, backward, network, sharded
from common.devices import GPU, cuda
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel import distributed
from torch.optim import AdamW

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.apps.turns import trace_rank
from zero_nb.apps.workloads import benchmark_models
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_buckets import split_like_ddp
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.comm.simulation import simulate
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def planned(features):
    """Give the parameters in each bucket of the plan, iteration after iteration, and of what DDP
    filled in the last one."""
    model = DDP(network(), bucket_cap_mb=CAP, **features)
    handle, found = overlap(model, sharded("adamw", model, False)), []
    for step in range(4):
        backward(model, step)
        found.append(
            [
                sorted({slot.param for slot in bucket.bucket.slots})
                for bucket in handle.step_plan.shard.buckets
            ]
        )
    return found, [sorted(run) for run in handle.planner.layout.filled], model.bucket_bytes_cap


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_the_first_plan_is_cut_as_ddp_will_cut_and_the_last_has_its_buckets(features):
    for found, filled, cap in run(2, planned, features):
        params = list(Net().double().parameters())
        largest = max(sum(params[i].nbytes for i in bucket) for bucket in found[0])
        assert found[-1] == filled and len(filled) > 2
        assert len(found[0]) > 2 and largest < cap + max(p.nbytes for p in params)


def planned_in_full(features):
    """Give the sizes of the plan's buckets, in bytes, iteration after iteration, of a model with 4 MB
    of parameters."""
    model = DDP(nn.Sequential(*(nn.Linear(300, 300) for _ in range(12))), **features)
    handle, found = overlap(model, sharded("adamw", model, False)), []
    for _ in range(4):
        model(torch.ones(4, 300)).square().mean().backward()
        buckets = [bucket.bucket for bucket in handle.step_plan.shard.buckets]
        found.append([4 * sum(slot.numel for slot in bucket.slots) for bucket in buckets])
    return found


LAYER = 4 * 300 * 301


@pytest.mark.parametrize(
    "features,wanted",
    [
        ({}, [3 * LAYER, 9 * LAYER]),  # DDP's first bucket is full at 1 MiB
        ({"gradient_as_bucket_view": True}, [3 * LAYER, 9 * LAYER]),
        ({"static_graph": True}, [3 * LAYER, 9 * LAYER]),
        ({"bucket_cap_mb": 1}, [3 * LAYER] * 4),
        ({"bucket_cap_mb": 25}, [12 * LAYER]),
    ],
    ids=str,
)
def test_the_first_plan_has_the_buckets_that_ddp_makes_next_whatever_its_caps(features, wanted):
    for found in run(2, planned_in_full, features):
        assert found == [wanted] * 4


@pytest.mark.parametrize(
    "features,count",
    [({"find_unused_parameters": True}, 2), ({"bucket_cap_mb_list": [1, 2]}, 3)],
    ids=str,
)
def test_the_last_plan_has_ddps_buckets_where_it_never_makes_one_for_all(features, count):
    if not features.keys() <= signature(DDP).parameters.keys():
        pytest.skip("this torch has one cap for all buckets")
    for found in run(2, planned_in_full, features):
        assert found[-1] == found[-2] and len(found[-1]) == count and sum(found[0]) == 12 * LAYER


@pytest.mark.parametrize(
    "given,most,wanted",
    [
        ([0, 1, 2], 41, [[0, 1, 2]]),
        ([1, 4], 16, [[1, 4]]),
        ([3], 1, [[3]]),  # as DDP fills them
        ([0, 1, 2], 40, [[1, 2], [0]]),
        ([4, 1], 16, [[4, 1]]),
        ([0, 1, 2, 3, 4, 5, 6], 60, [[4, 5, 6], [0, 1, 2, 3]]),
        ([4, 4, 4], 80, [[4], [4], [4]]),
    ],
    ids=str,
)
def test_a_run_that_goes_on_where_ddp_would_have_closed_its_bucket_is_cut_from_its_end(
    given, most, wanted
):
    params = [torch.zeros(n) for n in (7, 3, 9, 1, 20, 4, 4)]
    assert list(split_like_ddp([given], params, [most])) == wanted and list(
        split_like_ddp([given, given], params, [most])
    ) == [*wanted, *wanted]


@pytest.mark.parametrize(
    "filled,caps,wanted",
    [
        ([[0, 1, 2, 3, 4]], (4, 12), [[4], [1, 2, 3], [0]]),
        ([[4], [3, 2, 1], [0]], (4, 12), [[4], [3, 2, 1], [0]]),  # as DDP fills them
        ([[0, 1, 2, 3, 4]], (4, 8, 20), [[4], [2, 3], [0, 1]]),
        ([[0, 1, 2, 3, 4], [5, 6]], (4, 12), [[4], [1, 2, 3], [0], [6], [5]]),
        ([[5, 6], [0, 1, 2, 3, 4]], (9, 12), [[5, 6], [2, 3, 4], [0, 1]]),
    ],
    ids=str,
)
def test_each_dtype_has_a_first_bucket_with_a_cap_of_its_own(filled, caps, wanted):
    params = [torch.zeros(1)] * 5 + [torch.zeros(1, dtype=torch.float64)] * 2
    assert list(split_like_ddp(filled, params, caps)) == wanted


@measures_memory
@pytest.mark.usefixtures("small_pool")
def test_memory_does_not_rise_while_buckets_settle():
    def peak():
        def train():
            torch.manual_seed(0)
            model = DDP(
                nn.Sequential(*(nn.Linear(1200, 1200) for _ in range(20))),
                bucket_cap_mb=10,
                gradient_as_bucket_view=True,
            )
            overlap(
                model,
                ZeroRedundancyOptimizer(
                    model.parameters(), AdamW, lr=0.1, parameters_as_bucket_view=True
                ),
            )
            for _ in range(4):
                model(torch.ones(1, 1200)).sum().backward()

        return peak_bytes(torch.device("cpu"), train) / (20 * 1201 * 1200 * 4)

    # Parameters, gradients, and half of two moments: 3.35 with what is on its way. One bucket for all
    # takes 4.04. Code is mapped meanwhile (0.19), and counts where Linux has taken it back at the end.
    assert max(run(2, peak)) < 3.7


@pytest.mark.turns(3)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_iterations_end_and_replicas_agree(size):
    def many():
        group = dist.new_group(timeout=timedelta(seconds=30))
        models = [
            DDP(
                network(torch.float32),
                process_group=group,
                bucket_cap_mb=CAP,
                find_unused_parameters=unused,
            )
            for unused in (False, True)
        ]
        for interleaved, model in enumerate(models):
            overlap(
                model,
                sharded("adamw", model, False, process_group=group),
                interleaved=bool(interleaved),
            )
        for step in range(MANY):
            backward(models[0], step)
            backward(models[1], step, ((0, 1, 3), (2,), (3, 2))[(step + dist.get_rank()) % 3])
        return [apart(model) for model in models]

    assert run(size, many, timeout=600) == [[0.0, 0.0]] * size


MANY = 100  # of each of two models


class Settled:
    """A reducer whose buckets stay as they are: to exchange them, DDP reads on the host."""

    def __init__(self, reducer):
        self.reducer = reducer

    def __getattr__(self, name):
        return getattr(self.reducer, name)

    def _rebuild_buckets(self):
        return False


@pytest.fixture
def unreadable(monkeypatch):
    """Let DDP and ours work on "meta", where it is an error to read on the host, which waits on a
    GPU, and to mix tensors of two devices."""

    def address(tensor):
        return (
            tensor.untyped_storage()._cdata << 20
        ) + tensor.storage_offset() * tensor.element_size()

    def done(value):
        future = torch.futures.Future()
        future.set_result(value)
        return future

    real = torch.Tensor.data_ptr
    monkeypatch.setattr(
        torch.Tensor, "data_ptr", lambda tensor: address(tensor) if tensor.is_meta else real(tensor)
    )  # they all are at 0
    monkeypatch.setattr(distributed, "_verify_param_shape_across_processes", lambda *args: None)
    monkeypatch.setattr(
        import_module("zero_nb.backward.ddp_overlap"), "completed_future", done
    )  # torch's futures take numbered devices
    return monkeypatch


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "way,clip",
    [
        ("step", None),
        ("overlap", None),
        ("overlap", 1.0),
        ("interleaved", None),
        ("parallel", None),
        ("parallel", 1.0),
        ("parallel interleaved", None),
    ],
)
@pytest.mark.parametrize("shard", ["even", "whole"])
@pytest.mark.parametrize("size,rank", [(1, 0), (2, 1), (3, 0)])
def test_an_iteration_reads_nothing_from_its_device(size, rank, shard, way, clip, unreadable):
    clipping, interleaved, read = (
        {} if clip is None else {"max_grad_norm": clip},
        "interleaved" in way,
        torch.Tensor.tolist,
    )

    def read_once(tensor):
        return [1.0] * tensor.numel() if tensor.is_meta else read(tensor)

    with simulate(size, rank) as group:
        model = network(torch.float32).to("meta")
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, group, lr=0.1, shard=shard)
        trained = (
            data_parallel(model, zero, interleaved=interleaved, **clipping).module
            if way.startswith("parallel")
            else DDP(model, process_group=group)
        )
        if trained is not model:
            trained.reducer = Settled(trained.reducer)
        if way in ("overlap", "interleaved"):
            overlap(trained, zero, interleaved=interleaved, **clipping)
        for step in range(4):
            with unreadable.context() as once:
                if step == 0:
                    once.setattr(
                        torch.Tensor, "tolist", read_once
                    )  # which parameters are used on any rank
                with group.recording() as log:
                    trained(torch.empty(4, 6, device="meta")).square().mean().backward()
                zero.step()
                zero.zero_grad()
        assert size == 1 or way == "step" or log.only("reduce_scatter")
        for refused in (
            lambda: torch.empty(1, device="meta").item(),
            lambda: torch.empty(2, device="meta") + torch.ones(2),
        ):
            with pytest.raises(RuntimeError, match="meta"):
                refused()


@cuda
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("through", ["DDP", "no DDP"])
def test_an_iteration_does_not_wait_for_the_gpu(through, interleaved):
    def watched():
        model = network(torch.float32).cuda()
        zero, x = (
            ZeroRedundancyOptimizer(
                model.parameters(), AdamW, lr=0.1, fused=True, parameters_as_bucket_view=True
            ),
            torch.ones(4, 6, device="cuda"),
        )
        if through == "DDP":
            overlap(model := DDP(model, bucket_cap_mb=CAP), zero, interleaved=interleaved)
        else:
            data_parallel(model, zero, interleaved=interleaved)
        for step in range(6):
            loss = model(x).square().mean()
            if step > 3:
                torch.cuda.set_sync_debug_mode("error")  # the first iterations plan, and agree
            try:
                loss.backward()
                zero.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return all(bool(p.isfinite().all()) for p in model.parameters())

    assert run(1, watched, backend=GPU) == [True]


@cuda
@pytest.mark.parametrize("variant", ["zero1-overlap", "zero2-interleaved"])
def test_buckets_step_on_a_stream_of_their_own(variant):
    (found,) = run(
        1,
        lambda: trace_rank(variant, benchmark_models()["linear"], torch.device("cuda", 0)),
        backend=GPU,
    )
    streams = {kind: {s.line for s in found if s.kind == kind} for kind in ("step", "compute")}
    assert streams["step"] and streams["compute"] - streams["step"], streams
