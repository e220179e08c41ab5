"""torch.distributed.pipelining's CSV: what is exported runs there, comes back equal, and garbage is refused by place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given
from strategies import programs

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Op, Program
from adaptra.program.schedules import GENERATORS, forward_only, generate, one_f_one_b
from adaptra.program.torch_csv import from_csv, to_csv
from adaptra.program.verify import verify

if TYPE_CHECKING:
    from torch import Tensor, nn

# Two ranks, receives posted ahead of the ops that use them, W ops late: an order torch's own lowering does not emit.
ADAPTED = Program.parse(
    """schedule adapted placement=0,1 microbatches=4
    0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0I0 0RECV_B1 0RECV_B2 0W0 0F3 0SEND_F3 0I1 0I2 0RECV_B3 0W1 0W2 0I3 0W3
    1: 1RECV_F0 1RECV_F1 1F0 1I0 1SEND_B0 1RECV_F2 1F1 1I1 1SEND_B1 1W0 1RECV_F3 1F2 1I2 1SEND_B2 1W1 1F3 1I3 1SEND_B3 1W2 1W3
    """
)


def test_the_compute_only_form_is_one_row_of_actions_per_rank() -> None:
    assert to_csv(generate("1f1b", 2, 2)) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


def test_a_lowered_program_says_where_torch_scales_its_gradients() -> None:
    program = Program.parse(
        "schedule x placement=0,1 microbatches=1\n0: 0F0 0SEND_F0 0RECV_B0 0B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0\n"
    )
    assert to_csv(program) == "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1REDUCE_GRAD,1SEND_B0\n"


@given(programs())
def test_importing_what_was_exported_gives_the_program_back(program: Program) -> None:
    assert from_csv(to_csv(program), name=program.name) == program
    again = from_csv(to_csv(program), placement=program.placement, microbatches=program.microbatches, name="random")
    assert again == program


def test_forward_only_programs_round_trip() -> None:
    assert from_csv(to_csv(forward_only(range(3), 4)), name="forward_only") == forward_only(range(3), 4)


def test_idle_cells_spaces_and_both_line_ends_are_read() -> None:
    assert from_csv("0F0, 0B0,,\r\n,1F0,1B0\r\n") == Program.of_pipeline(
        "csv", (0, 1), 1, ((Op(0, Kind.F, 0), Op(0, Kind.B, 0)), (Op(1, Kind.F, 0), Op(1, Kind.B, 0)))
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F0zzz\n", r"^row 1, column 2: '0F0zzz': expected STAGE ACTION MICROBATCH such as 2F0 or 1SEND_F3$"),
        ("0F0,0FX\n", r"^row 1, column 2: '0FX': expected STAGE ACTION"),
        ("0F0,0F\n", r"^row 1, column 2: '0F': expected STAGE ACTION"),
        ("0F0,0SEND_F0@delegate\n", r"^row 1, column 2: '0SEND_F0@delegate': expected STAGE ACTION"),
        ("0F0\n1F0,,1F0\n", r"^row 2, column 3: 1F0 stands twice, first in row 2, column 1: expected each action once$"),
        ("0F0,0UNSHARD\n", r"^row 1, column 2: 0UNSHARD: adaptra has no such action: .*format='compute_only'"),
        ("0RESHARD\n", r"^row 1, column 1: 0RESHARD: adaptra has no such action"),
        ("(0F1;0B0)OVERLAP_F_B\n", r"^row 1, column 1: \(0F1;0B0\)OVERLAP_F_B: adaptra has no such action"),
        ("0F0,0REDUCE_GRAD\n", r"^row 1, column 2: 0REDUCE_GRAD: no W or B of stage 0 stands before it"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", r"^row 1, column 4: 0REDUCE_GRAD stands twice"),
        ("0F0,0B0,0REDUCE_GRAD,0F1,0B1\n", r"^row 1, column 5: 0B1 stands behind 0REDUCE_GRAD: expected it before$"),
        ("0F0\n0B0\n", r"^row 2, column 1: 0B0: stage 0 already stands in row 1$"),
        ("0F0\n2F0\n", r"^stage 1 occurs in no row, but stage 2 does: expected all of 0\.\.2$"),
        ("0F0\n\n1F0\n", r"^row 2 holds no action: expected every rank to hold a stage$"),
        ("", r"^empty CSV: expected one row of actions per rank$"),
        (",,\n", r"^empty CSV"),
        ('"0F0\n', r"^not CSV: "),
    ],
)
def test_what_is_not_a_schedule_is_refused_by_row_and_column(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


def test_arguments_that_contradict_the_csv_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"^row 1, column 2: 0F1: expected microbatches 0\.\.0$"):
        from_csv("0F0,0F1\n", microbatches=1)
    with pytest.raises(ScheduleError, match=r"^row 1, column 1: 0F0: placement 1,0 puts no stage 0 here$"):
        from_csv("0F0\n1F0\n", placement=(1, 0))


def test_lanes_are_refused_rather_than_dropped() -> None:
    program = Program.of_pipeline("x", (0,), 1, ((Op(0, Kind.SEND_F, 0, "delegate"),),))
    with pytest.raises(ScheduleError, match=r"^x: rank 0: 0SEND_F0@delegate: torch's CSV has no lanes"):
        to_csv(program)


def _model() -> list[nn.Sequential]:
    import torch

    torch.manual_seed(3)
    return [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(2)]


def _batch() -> tuple[Tensor, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(4)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def _gradients_in_one_process(microbatches: int) -> list[list[Tensor | None]]:
    """The gradients of the mean of the microbatches' losses, by plain autograd."""
    import torch

    first, second = _model()
    inputs, targets = _batch()
    for some, wanted in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        (torch.nn.functional.mse_loss(second(first(some)), wanted) / microbatches).backward()
    return [[parameter.grad for parameter in stage.parameters()] for stage in (first, second)]


def _train_under_torch(
    rank: int, folder: str, schedules: list[tuple[str, Literal["compute_only", "compute_comms"], int]]
) -> None:
    """One rank: for each CSV file, load it into torch's runtime, train one step and compare the gradients."""
    import torch
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    inputs, targets = _batch()
    for file, form, microbatches in schedules:
        module = _model()[rank]
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        runtime = _PipelineScheduleRuntime([stage], microbatches, loss_fn=torch.nn.functional.mse_loss)
        runtime._load_csv(f"{folder}/{file}", format=form)
        losses: list[torch.Tensor] = []
        if rank == 0:
            runtime.step(inputs)
        else:
            runtime.step(target=targets, losses=losses)
            assert len(losses) == microbatches
        expected = _gradients_in_one_process(microbatches)[rank]
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, msg=lambda text, file=file: f"{file}: {text}")
        if form == "compute_only":
            runtime._dump_csv(f"{folder}/dumped-{rank}-{file}", format="compute_only")
    distributed.destroy_process_group()


@pytest.mark.processes
def test_torchs_own_runtime_loads_and_trains_with_exported_schedules(tmp_path: Path) -> None:
    """All generators and an unsplit one in "compute_only" form, an adapted order with its own communication in the other."""
    from torch import multiprocessing

    exported = [generate(name, 2, 4) for name in GENERATORS] + [one_f_one_b(2, 4, split=False)]
    schedules: list[tuple[str, str, int]] = []
    for number, program in enumerate(exported):
        (tmp_path / f"{number}.csv").write_text(to_csv(program))
        schedules.append((f"{number}.csv", "compute_only", program.microbatches))
    (tmp_path / "adapted.csv").write_text(to_csv(ADAPTED))
    schedules.append(("adapted.csv", "compute_comms", ADAPTED.microbatches))

    multiprocessing.spawn(_train_under_torch, args=(str(tmp_path), schedules), nprocs=2)

    verify(ADAPTED)
    assert from_csv((tmp_path / "adapted.csv").read_text(), name="adapted") == ADAPTED
    for number, program in enumerate(exported):
        dumped = (tmp_path / f"dumped-0-{number}.csv").read_text()
        assert from_csv(dumped, name=program.name) == program
