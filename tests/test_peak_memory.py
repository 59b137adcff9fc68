"""What a call takes of memory at its peak, as the system counts it."""

import mmap
import sys

import pytest
import torch

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.comm.launch import run


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_peak_is_above_the_start():
    def peak():
        return [
            peak_bytes(torch.device("cpu"), lambda m=m: torch.ones(m * 250_000)) for m in (100, 20)
        ]  # the mark is reset

    large, small = run(1, peak)[0]
    assert 99e6 < large < 102e6 and 19e6 < small < 22e6


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_peak_counts_memory_that_was_given_back_before():
    def peak():
        torch.ones(6_000_000)  # malloc learns to keep chunks of this size
        kept = [torch.ones(1_000_000) for _ in range(10)]
        last = torch.ones(1000)  # above them, so that they stay when they are free
        del kept
        return (
            peak_bytes(torch.device("cpu"), lambda: [torch.ones(1_000_000) for _ in range(10)]),
            last.sum(),
        )

    assert 38e6 < run(1, peak)[0][0] < 44e6


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_peak_counts_memory_in_the_heap_of_a_thread():
    def peak():
        with pytest.raises(RuntimeError):
            torch.empty(1 << 55)  # from now on glibc serves this thread from a heap of its own
        torch.ones(7_900_000)  # and keeps up to 64 MB free at the end of it
        small = [bytearray(30_000) for _ in range(1500)]
        del small
        return peak_bytes(torch.device("cpu"), lambda: torch.ones(5_000_000))

    assert 19e6 < run(1, peak)[0] < 22e6


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_peak_leaves_out_the_pages_of_files(tmp_path):
    (tmp_path / "library").write_bytes(bytes(30_000_000))

    def peak():
        with (
            open(tmp_path / "library", "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages,
        ):

            def work():
                assert not sum(
                    pages[::4096]
                )  # mapped now, as a library's code is when it first runs
                torch.ones(10_000_000)

            return peak_bytes(torch.device("cpu"), work)

    assert 39e6 < run(1, peak)[0] < 42e6
