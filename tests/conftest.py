"""Options and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import inside
import lab
import linked_hosts as links
import pytest
from fake_cuda.building import has_cuda
from fake_cuda.building import missing as fake_cuda_missing
from fake_cuda.loading import enable as enable_fake_cuda
from fake_cuda.refusals import cannot_run_on_cuda, gives_no_bits
from golden_files import check_golden
from hypothesis import settings
from late import skip_if_late
from paths import ROOT
from patience import HUNG

# A loaded machine is no reason to fail: pytest's own time limit ends what hangs, and speed is measured in bench/.
settings.register_profile("adaptra", deadline=None)
settings.load_profile("adaptra")

# torch's store asks for the name of each host that connects, and answers nobody meanwhile. A name server that loses a question
# makes that a second or more. Tests make thousands of connections by address, so no name server is asked.
os.environ.setdefault("RES_OPTIONS", "attempts:0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-golden", action="store_true", help="write golden files instead of comparing with them")
    parser.addoption("--lab-kernel", type=Path, default=lab.CACHED_KERNEL, help="the kernel of tests marked rdma")
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: on a GPU, or on the stand-in of tests/fake_cuda"
    )
    parser.addoption("--transport", help="c10d, delegate or nccl: train every architecture over it, on two and on four ranks")
    parser.addoption("--begin-before", type=float, help="skip the tests that would begin later than this time, as time.time()")


def pytest_configure(config: pytest.Config) -> None:
    """Have torch take the stand-in for CUDA, before anything imports torch, unless there is a GPU."""
    if config.getoption("--device") == "cuda" and not has_gpu():
        if (reason := fake_cuda_missing()) is not None:
            pytest.exit(f"--device=cuda: {reason}", returncode=0)
        # Over NCCL each rank has a device of its own.
        enable_fake_cuda(4 if config.getoption("--transport") == "nccl" else 2)


def has_gpu() -> bool:
    """Whether torch finds a GPU itself; cuBLAS then gives the same bits each time."""
    if not has_cuda():
        return False
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Skip a test on a GPU that has no deterministic kernel for one of its ops: there are no bits to compare."""
    try:
        return (yield)
    except Exception as error:
        if item.config.getoption("--device") == "cuda" and (reason := gives_no_bits(error)) is not None:
            pytest.skip(reason)
        raise


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--device=cuda``, tensors and modules that tests make are on the device; what adaptra makes is left alone."""
    if request.config.getoption("--device") == "cpu":
        yield
        return
    from fake_cuda.made_by_tests import on_cuda

    if (reason := cannot_run_on_cuda(request.node.nodeid)) is not None:
        pytest.skip(reason)
    with on_cuda():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """With ``--device=cuda``, have also the tensors that test modules make when they are imported on the stand-in."""
    with _of_tests(collector):
        return (yield)


def _of_tests(collector: pytest.Collector) -> AbstractContextManager[Any]:
    """Where a module's tensors are made. The stand-in's own tests name their devices."""
    is_on_cuda = collector.config.getoption("--device") == "cuda"
    if not is_on_cuda or not isinstance(collector, pytest.Module) or "tests/fake_cuda/" in collector.nodeid:
        return nullcontext()
    from fake_cuda.made_by_tests import MadeByTests

    return MadeByTests()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the tests whose verdict comes from the machine's clock run once more if they fail: its noise is no defect."""
    for item in items:
        if any(item.iter_markers("timed")) or any(item.iter_markers("alone")):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """Have the collector look at what tests make only: torch, sympy and the tests themselves are a million objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter take down what was frozen, of which extensions else complain as of leaks."""
    gc.unfreeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_if_late(item.config)


@pytest.fixture
def no_accelerator_left() -> Iterator[None]:
    """Accelerators share the state of their process: the next test begins without one."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A sum over several threads is taken in an order of its own, and stages are threads already."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a golden file: ``golden("name.sched", text)``; see golden_files.py."""
    return partial(check_golden, accept=bool(request.config.getoption("--accept-golden")))


@pytest.fixture
def in_lab(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Boots a lab and calls a function in it, outside of all hosts: ``in_lab(body, argument, …, hosts=2)``.

    The function is at the top level of a test module, its arguments and its result are JSON values. The test is skipped where
    there can be no lab.
    """
    kernel: Any = request.config.getoption("--lab-kernel")
    if (reason := lab.missing(kernel)) is not None:
        pytest.skip(reason)

    def call(body: Callable[..., Any], *arguments: Any, hosts: int = 2, rails: int = 2, timeout: float = HUNG) -> Any:
        command = inside.command(body, *arguments)
        finished = lab.run(kernel, command, ROOT, hosts=hosts, rails=rails, timeout=timeout)
        assert finished.status == 0, finished.output
        return inside.result_of(finished.output)

    return call


@pytest.fixture
def needs_linked_hosts() -> None:
    """Skips the test where there can be no hosts joined by links; see tests/links/linked_hosts.py."""
    if (reason := links.missing()) is not None:
        pytest.skip(reason)


@pytest.fixture
def linked_hosts(needs_linked_hosts: None) -> type[links.LinkedHosts]:
    """Makes hosts joined by links: ``with linked_hosts(2, "0-1 delay=30ms") as hosts: hosts.call(body, argument)``."""
    return links.LinkedHosts
