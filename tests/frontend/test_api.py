"""adaptra.compile with its ranks as threads of this process: each mistake has its message, and what a pipeline offers works."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import EXAMPLES
from opentelemetry.trace import NoOpTracerProvider
from processes import free_port
from torch import Tensor, nn

import adaptra
from adaptra.errors import BatchError, PipelineError
from adaptra.program import Program

ROWS, MICROBATCHES = 8, 4
MLP = EXAMPLES["skip_mlp"]
(X,), _, Y = MLP.rows(ROWS, seed=0)


pytestmark = pytest.mark.usefixtures("one_thread")


def compiled(name: str = "skip_mlp", **arguments: Any) -> adaptra.Pipeline:
    example = EXAMPLES[name]
    args, kwargs, targets = example.rows(ROWS, seed=0)
    defaults: dict[str, Any] = {
        "model": example.make(),
        "stages": 2,
        "microbatches": MICROBATCHES,
        "example_inputs": (args,) if targets is None else (args, targets),
        "example_kwargs": kwargs,
        "loss": example.loss,
    }
    given = defaults | arguments
    return adaptra.compile(given.pop("model"), **given)


def load_anything(pipe: adaptra.Pipeline, state: Any) -> None:
    pipe.load_state_dict(state)


class Branching(nn.Module):
    """What torch.export can't capture."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else x


class Rounded(torch.autograd.Function):
    """A backward method of one's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        return grad_outputs[0]


class Quantized(nn.Module):
    """What calls an autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(self.inner(x))


class Masked(nn.Module):
    """What sends on a tensor of another dtype beside its activations."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(self.dtype)
        return self.last(torch.tanh(self.first(x))) * mask


WRONG_BUCKETS: tuple[Any, ...] = (0, True, "4MiB")


def options(**given: Any) -> Callable[[], object]:
    return lambda: compiled(options=adaptra.Options(**given))


def example(**given: Any) -> Callable[[], object]:
    return lambda: compiled(**given)


def emulate(*durations: Any) -> Callable[[], object]:
    return lambda: compiled(options=adaptra.Options(emulate=adaptra.EmulatedDevice(*durations)))


def on_pipeline(run: Callable[[adaptra.Pipeline], object], name: str = "skip_mlp") -> Callable[[], object]:
    """A mistake made with a pipeline that is compiled."""

    def mistake() -> object:
        with compiled(name) as pipe:
            return run(pipe)

    return mistake


def on_list(run: Callable[[adaptra.Pipeline], object]) -> Callable[[], object]:
    """A pipeline whose stages are given as modules."""

    def mistake() -> None:
        width, classes = X.shape[1], Y.shape[1]
        modules = [nn.Linear(width, width), nn.Linear(width, classes)]
        with compiled(model=modules, stages=2, example_inputs=(X, Y)) as pipe:
            run(pipe)

    return mistake


def before_compiling(run: Callable[[adaptra.Pipeline], object]) -> Callable[[], object]:
    return lambda: run(compiled(example_inputs=None, example_kwargs=None))


def after_close(run: Callable[[adaptra.Pipeline], object]) -> Callable[[], object]:
    def mistake() -> object:
        pipe = compiled()
        pipe.step(X, Y)
        pipe.close()
        return run(pipe)

    return mistake


def after_failing(run: Callable[[adaptra.Pipeline], object]) -> Callable[[], object]:
    def mistake() -> object:
        with compiled("gpt_tied") as pipe:
            with pytest.raises(IndexError):
                pipe.step(*bad_tokens())
            return run(pipe)

    return mistake


def bad_tokens() -> tuple[Tensor, Tensor]:
    """A batch with a token that the embedding of stage 0 does not have."""
    (tokens,), _, targets = EXAMPLES["gpt_tied"].rows(ROWS, seed=1)
    tokens[ROWS // 2, 0] = 999
    return tokens, targets


def no_matplotlib() -> None:
    with compiled() as pipe, pytest.MonkeyPatch.context() as patch:
        pipe.step(X, Y)
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        pipe.save_trace("step.svg")


def telemetry(**given: Any) -> Callable[[], object]:
    return lambda: compiled(options=adaptra.Options(telemetry=adaptra.Telemetry(**given)))


def two_runs_in_a_folder() -> None:
    with tempfile.TemporaryDirectory() as folder, compiled(options=adaptra.Options(telemetry=adaptra.Telemetry(folder=folder))):
        telemetry(folder=folder)()


def two_runs_on_a_port() -> None:
    port = free_port()
    with compiled(options=adaptra.Options(telemetry=adaptra.Telemetry(metrics_port=port))):
        telemetry(metrics_port=port)()


def without(package: str, **given: Any) -> Callable[[], object]:
    """A mistake made where a package is not installed."""

    def mistake() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in [
                package,
                *(name for name in sys.modules if name.startswith((f"{package}.", f"torch.utils.{package}"))),
            ]:
                patch.setitem(sys.modules, name, None)
            patch.delitem(sys.modules, "adaptra.runtime.telemetry.otel", raising=False)  # it imports its package at the top
            telemetry(**given)()

    return mistake


def no_distributed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_available", lambda: False)
        compiled()


def wait_too_long() -> None:
    with compiled(options=adaptra.Options(timeout=0.2, faults=["delay 0>1 3s @1"])) as pipe:
        pipe.step(X, Y)
        pipe.step(X, Y)


INCOMPLETE = Program.parse("schedule mine placement=0,1 microbatches=4\n0: 0F0\n1: 1F0\n")
OPTIONS = EXAMPLES["options"].rows(ROWS, seed=0)
"""A batch of a model that takes an int and keyword arguments."""

MISTAKES: list[tuple[str, Callable[[], object]]] = [
    ("model: a …: expected a torch.nn.Module, or a list of them, one for every stage", example(model=nn.Linear)),
    *(("stages=…: expected a whole number of at least 1", example(stages=given)) for given in (0, -1, 2.0, "2", True, None)),
    *(("microbatches=…: expected a whole number of at least 1", example(microbatches=given)) for given in (0, 4.0, "4")),
    (
        "mesh=…: expected a torch.distributed DeviceMesh whose mesh_dim_names are ('dp', 'pp'), or ('pp',)",
        example(mesh="dp, pp"),
    ),
    *(
        ("memory=…: expected a size such as '2GiB' or '500MB', or a number of microbatches", example(memory=given))
        for given in ("2", "GiB", "-1 GiB", "2 gib", "0.1 B")
    ),
    (
        "memory=…: stage … needs … for one microbatch, and keeps … of it from F to I: expected at least what it needs; half "
        "the rows per microbatch or twice the stages need about …, activation checkpointing keeps … or more",
        example(memory="1 KiB"),
    ),
    *(("memory=…: expected a whole number of at least 1", example(memory=given)) for given in (0, -1, 1.5, [2, 2])),
    ("loss=…: expected a function of (outputs, targets), or None if the model returns the loss", example(loss="mean")),
    ("split=…: expected a list of module names, one for every stage but the first", example(split="layers.4")),
    ("options=…: expected adaptra.Options(...)", example(options={"adapt": False})),
    ("example_kwargs=…: expected a dict of the model's keyword arguments", example(example_kwargs=[1])),
    ("transport '…': expected one of …", example(transport="pigeon")),
    (
        "transport '…' needs … processes: start this script with torchrun --nproc-per-node=…, or call "
        "torch.distributed.init_process_group yourself; without a launcher use transport='local'",
        example(transport="c10d"),
    ),
    ("the local transport needs torch.distributed, and this torch was built without it", no_distributed),
    ("module … (…) at …: the model can't become one graph: …", example(model=Branching())),
    (
        "… at …: the model calls a torch.autograd.Function, whose backward method a graph can't hold: expected ops of torch; "
        "make it an op with torch.library.custom_op and register_autograd",
        example(model=Quantized()),
    ),
    (
        "the model returned …: without loss= the model must return a scalar loss, or a dict, tuple or dataclass whose first "
        "element or .loss is the scalar loss; is loss= missing?",
        example(loss=None, example_inputs=X),
    ),
    (
        "the loss function returned …: expected a scalar tensor, such as the mean of the losses",
        example(loss=lambda outputs, targets: outputs - targets),
    ),
    (
        "stages=…: the model has only … operations that can be told apart as stages: use stages=… or fewer",
        example(stages=100),
    ),
    ("split=…: … names for … stages: expected …, one per later stage", example(split=["layers.2", "layers.4"])),
    ("split=…: no module '…' runs in this model: …", example(split=["layers.9"])),
    *(
        (
            "loss= compares outputs with targets, but no targets were given: expected example_inputs=(inputs, targets), a "
            "tuple of two, or a first step with both on every rank",
            mistake,
        )
        for mistake in (
            example(example_inputs=X),
            example(example_inputs=[X, Y]),
            before_compiling(lambda pipe: pipe.step(X)),
        )
    ),
    (
        "…: a tuple of …: expected inputs alone or (inputs, targets); several inputs are a tuple of their own, as "
        "in ((first, second), targets)",
        example(example_inputs=(X, X, Y)),
    ),
    (
        "example_inputs: a batch of … rows does not divide into … microbatches: use a batch of … rows or another number of "
        "microbatches",
        example(microbatches=3),
    ),
    (
        "example_inputs: one tensor has … rows, another has shape …: expected all tensors of a batch to have the same first "
        "dimension; keep a tensor without a batch dimension as a buffer of the model",
        example(example_inputs=(X, Y[:4])),
    ),
    ("inputs: …: expected arguments of forward…", example(example_kwargs={"mask": X})),
    ("inputs: …: expected arguments of forward…", on_pipeline(lambda pipe: pipe.step(X, Y, mask=X))),
    ("inputs: …: expected arguments of forward…", on_pipeline(lambda pipe: pipe.step(None, Y))),
    (
        "inputs: given …: expected the structure the pipeline was compiled for, …",
        on_pipeline(lambda pipe: pipe.step([X], Y)),
    ),
    (
        "inputs: a batch of … rows: expected …, … microbatches of the … rows the pipeline was compiled for; for another number "
        "of rows, every rank needs inputs and targets, and a model that adaptra.compile cuts itself",
        on_list(lambda pipe: pipe.step(X[:4], Y[:4])),
    ),
    (
        "targets: a batch of … rows: expected …, … microbatches of the … rows the pipeline was compiled for; for another "
        "number of rows, every rank needs inputs and targets, and a model that adaptra.compile cuts itself",
        on_list(lambda pipe: pipe.step(X, Y[:4])),
    ),
    *(
        ("… has … rows, … has …: expected all tensors of a batch to have the same first dimension", mistake)
        for mistake in (
            on_pipeline(lambda pipe: pipe.step(X, Y[:4])),
            on_pipeline(lambda pipe: pipe.eval_step(X, Y[:4])),
        )
    ),
    ("…: a batch of 0 rows: expected at least one row", on_pipeline(lambda pipe: pipe.step(X[:0], Y[:0]))),
    *(
        ("a batch of …: the model can't be compiled for this shape: …", on_pipeline(lambda pipe, of=of: pipe.step(*of)))
        for of in ((X[:, :4], Y), (X, Y[:, :3]))
    ),
    ("shapes=…: expected a whole number of at least 1", options(shapes=0)),
    *(
        ("inputs: … is …: expected …, as when the pipeline was compiled", on_pipeline(lambda pipe, x=x: pipe.step(x, Y)))
        for x in (X.double(), X[:, None], X[0, 0])
    ),
    *(
        ("targets: … is …: expected …, as when the pipeline was compiled", on_pipeline(lambda pipe, y=y: pipe.step(X, y)))
        for y in (Y.bfloat16(), Y[:, 0])
    ),
    (
        "inputs: … is …: expected …, as when the pipeline was compiled; for other sizes, every rank needs inputs and targets, "
        "and a model that adaptra.compile cuts itself",
        on_list(lambda pipe: pipe.step(X[:, :4], Y)),
    ),
    (
        "targets: … is …: expected …, as when the pipeline was compiled; for other sizes, every rank needs inputs and targets, "
        "and a model that adaptra.compile cuts itself",
        on_list(lambda pipe: pipe.step(X, Y[:, :3])),
    ),
    ("inputs: … is …: expected a tensor of …", on_pipeline(lambda pipe: pipe.step(3.0, Y))),
    (
        "… is a numpy array: expected tensors; torch.from_numpy makes one of it",
        on_pipeline(lambda pipe: pipe.step(X.cpu().numpy(), Y)),
    ),
    (
        "… is a …: expected one batch of it, as in a loop: for batch in loader",
        on_pipeline(lambda pipe: pipe.step(iter([X]), Y)),
    ),
    (
        "… is a …, whose values could change unseen: expected tensors, in dicts, lists, tuples, named tuples, dataclasses, or "
        "classes derived from dict or UserDict",
        on_pipeline(lambda pipe: pipe.step({1, 2}, Y)),
    ),
    (
        "… is a tensor of layout …: expected a dense one, as its rows are split; give its to_dense()",
        on_pipeline(lambda pipe: pipe.step(X.cpu().to_sparse(), Y)),
    ),
    (
        "… is a list of … values such as …, as many as the batch has rows, and each microbatch would get all of them: expected "
        "a tensor, which is split by rows, or a tuple if these are no rows",
        on_pipeline(lambda pipe: pipe.step(X, [1.0] * ROWS)),
    ),
    ("targets: targets is …: expected a tensor of …", on_pipeline(lambda pipe: pipe.step(X))),
    ("targets: targets is …: expected a tensor of …", on_pipeline(lambda pipe: pipe.step(X, 3.0))),
    *(
        (
            "inputs: … is …, but the pipeline was compiled with … as a constant: pass that value, compile again for this one, "
            "or pass a tensor in both places",
            on_pipeline(lambda pipe, changed=changed: pipe.step(*changed, **OPTIONS[1]), "options"),
        )
        for changed in (((OPTIONS[0][0], 3),), ((OPTIONS[0][0], 2, True),), ((OPTIONS[0][0], torch.tensor(2)),))
    ),
    ("schedule '…': expected one of …", options(schedule="2f2b")),
    ("…: stage …, microbatch …: rank … has nothing: expected …", options(schedule=INCOMPLETE)),
    *(
        ("schedule …: placement … and … microbatches: expected … and …", options(schedule=adaptra.generate("1f1b", *sizes)))
        for sizes in ((3, MICROBATCHES), (2, 5))
    ),
    (
        "schedule …: rank … holds activations of …: expected at most …, as memory= allows",
        example(memory=2, options=adaptra.Options(schedule="gpipe")),
    ),
    ("adapt=…: expected True or False", options(adapt="no")),
    ("share=…: expected True or False", options(share=1)),
    ("noise_scale=…: expected True or False", options(noise_scale=1)),
    ("schedule=…: expected a generator's name such as '1f1b', an adaptra.Program, or None", options(schedule=1)),
    *(
        (
            "expected_delays=…: expected per directed edge of neighbouring stages its delays in seconds and the weight of "
            "each, such as {(1, 2): {0.0: 0.9, 0.06: 0.1}}",
            options(expected_delays=given),
        )
        for given in (
            [(1, 2)],
            {(0, 2): {0.1: 1}},
            {(0, 1): {}},
            {(0, 1): 0.1},
            {(0, 1): {-1: 1}},
            {(0, 1): {0.1: 0}},
            {(0, 1): {"a": 1}},
        )
    ),
    (
        "expected_delays=… together with schedule=…: expected one of them, as both say what comes first",
        options(expected_delays={(0, 1): {0.1: 1}}, schedule="1f1b"),
    ),
    (
        "edge …→…: expected two neighbouring stages of 0..…",
        example(options=adaptra.Options(expected_delays={(6, 7): {0.1: 1}})),
    ),
    *(("seed=…: expected a whole number of 0..2**63-1", options(seed=given)) for given in (-1, 1.0, None, 2**63)),
    *(
        ("planning_seconds=…: expected a number of seconds above 0", options(planning_seconds=given))
        for given in (0, float("inf"), None)
    ),
    *(
        ("timeout=…: expected a number of seconds above 0", options(timeout=given))
        for given in (0, -1, float("nan"), float("inf"), "30")
    ),
    *(
        ("faults=…: expected a list of texts such as ['delay 1-2 60ms @8']", options(faults=given))
        for given in ("slow 1 2x", [1], None)
    ),
    ("emulate=…: expected an adaptra.EmulatedDevice or None", options(emulate=0.02)),
    (
        "delegate=…: expected True, False or directed edges of neighbouring stages such as [(1, 2)]",
        options(delegate=[(0, 2)]),
    ),
    ("delegate=…: expected edges of stages 0..…", options(delegate=[(1, 2)])),
    ("addresses=…: expected a list of numeric addresses of this host such as ['10.0.0.1']", options(addresses="10.0.0.1")),
    *(("lossy_bf16=…: expected True, False or 'slow'", options(lossy_bf16=given)) for given in ("yes", 1, None)),
    *(
        (
            "lossy_bf16: the message from stage … to … holds …: expected float32 alone, which can be rounded; cut the "
            "model elsewhere by split=, or send messages as they are",
            example(model=Masked(dtype), split=["last"], options=adaptra.Options(lossy_bf16=True)),
        )
        for dtype in (torch.int64, torch.bool, torch.float64)
    ),
    (
        "Options(delegate=...) with transport '…': expected c10d or nccl, whose slow edges the delegate takes over",
        options(delegate=True),
    ),
    ("on_event=…: expected a function that is called with each event, or None", options(on_event=[])),
    ("reduce=…: expected adaptra.Reduce(...)", options(reduce="chain")),
    (
        "Reduce: dtype=…: expected torch.float32, or None for that of the gradients",
        lambda: adaptra.Reduce(dtype=torch.bfloat16),
    ),
    ("Reduce: algorithm=…: expected 'direct', 'chain' or 'auto'", lambda: adaptra.Reduce(algorithm="ring")),  # type: ignore[arg-type]
    *(
        ("Reduce: bucket=…: expected bytes, a whole number above 0, or None", lambda given=given: adaptra.Reduce(bucket=given))
        for given in WRONG_BUCKETS
    ),
    *(
        (
            "Reduce: memory=…: expected bytes, a whole number above 0, or None",
            lambda given=given: adaptra.Reduce(algorithm="auto", memory=given),
        )
        for given in WRONG_BUCKETS
    ),
    (
        "Reduce: memory=…: expected it with algorithm='auto' alone, which holds terms back",
        lambda: adaptra.Reduce(memory=1 << 20),
    ),
    ("telemetry=…: expected adaptra.Telemetry(...)", options(telemetry="runs")),
    ("Telemetry: folder=…: expected a folder's name, or None", telemetry(folder=3)),
    *(
        ("Telemetry: metrics_port=…: expected a port of 1..65535, or None", telemetry(metrics_port=given))
        for given in (0, 65536, "9400", True)
    ),
    (
        "Telemetry: metrics_address=…: expected an address of this host such as '127.0.0.1'",
        telemetry(metrics_port=9400, metrics_address=None),
    ),
    ("Telemetry: tensorboard=…: expected a folder's name, a SummaryWriter, or None", telemetry(tensorboard=print)),
    (
        "Telemetry: on_record=…: expected a function that is called with each record, or None",
        telemetry(on_record="print"),
    ),
    ("Telemetry: otel=…: expected True, False, or a TracerProvider of opentelemetry.sdk", telemetry(otel="http://collector")),
    *(
        (
            "Telemetry: otel=…: the tracer provider is a …: expected a TracerProvider of opentelemetry.sdk, as "
            "opentelemetry.trace.set_tracer_provider or opentelemetry-instrument sets it",
            telemetry(otel=given),
        )
        for given in (True, NoOpTracerProvider())
    ),
    ("Telemetry: folder …: …: expected one that can be written", telemetry(folder="/proc/no such folder")),
    ("Telemetry: folder …: another run is writing there: expected a folder of its own", two_runs_in_a_folder),
    *(
        (
            "Telemetry: metrics on …: …: expected a free port of this host; each rank of the job listens on metrics_port + its "
            "rank",
            mistake,
        )
        for mistake in (two_runs_on_a_port, telemetry(metrics_port=free_port(), metrics_address="192.0.2.1"))
    ),
    ("metrics need prometheus_client: pip install 'adaptra[metrics]'", without("prometheus_client", metrics_port=9400)),
    ("scalars need tensorboard: pip install 'adaptra[tensorboard]'", without("tensorboard", tensorboard="runs")),
    ("traces need opentelemetry-sdk: pip install 'adaptra[otel]'", without("opentelemetry", otel=True)),
    ("traces need opentelemetry-sdk: pip install 'adaptra[otel]'", without("opentelemetry.sdk", otel=True)),
    *(
        ("EmulatedDevice: … has … durations: expected one number for all stages or …, one per stage", mistake)
        for mistake in (emulate([0.1], 0.1, 0.1), emulate(0.1, 0.1, (0.1, 0.1, 0.1)))
    ),
    *(
        ("EmulatedDevice: …: expected seconds, finite and not negative", mistake)
        for mistake in (emulate(-0.1, 0.1, 0.1), emulate(0.1, "fast", 0.1), emulate(0.1, 0.1, [0.1, float("nan")]))
    ),
    (
        "fault '…': expected such as 'delay 1-2 60ms @8', 'delay 1>2@replica0 60ms @8..20', 'rate 1>2 50MB @8', "
        "'rate 1-2 /6 @8', 'lossy 1-2 5% 200ms @8', 'slow 2 1.5x @8', 'slow 1.2 5ms', 'break 1.2 @8', 'kill 1.2 @8:2W3', "
        "'freeze 1.2 @8 5s' or 'cut 1.2 @8 3s'",
        options(faults=["delay 0-1"]),
    ),
    *(
        ("fault lossy …%: expected above 0% and at most 100%, and of a lossy edge alone", options(faults=[given]))
        for given in ("lossy 0-1 0% 200ms", "lossy 0>1 150% 200ms")
    ),
    *(
        ("fault '…': there is no stage …: expected stages of 0..…", options(faults=[given]))
        for given in ("slow 2 2x", "delay 1-2 5ms", "rate 7>0 1MB")
    ),
    *(
        ("fault '…': there is no replica …: expected replicas of 0..…", options(faults=["slow 0.1 2x", given]))
        for given in ("slow 1.0 2x", "freeze 1.1 @8 5s", "delay 0-1@replica1 5ms")
    ),
    *(("fault '…': expected a duration, such as '…'", options(faults=[given])) for given in ("freeze 1 @8", "cut 1 @8:1W3")),
    *(
        ("fault '…': expected no duration, such as '…'", options(faults=[given]))
        for given in ("kill 1 @8 5s", "break 1 @8:1W3 5ms")
    ),
    *(
        (
            "fault '…': no point '…': expected an F, I, W or B such as 2W3, REDUCE, certificate, optimizer or clip",
            options(faults=[given]),
        )
        for given in (
            "break 1 @8:begin",
            "break 1 @8:1STEP",
            "break 1 @8:1SEND_F0",
            "freeze 1 @8:1W0@delegate 5s",
            "break 1 @8:W0",
        )
    ),
    *(
        ("fault '…': its worker has no op …: expected one of stage … and microbatch 0..…", options(faults=[given]))
        for given in ("break 1 @8:0W3", "break 1 @8:1W4")
    ),
    (
        "fault '…': one replica has no sum over replicas: expected several, or another point",
        options(faults=["break 1 @8:REDUCE"]),
    ),
    (
        "fault '…': all workers are threads of this process, which would end: expected a process for each, as under torchrun, "
        "or '…'",
        options(faults=["kill 1 @8:1W3"]),
    ),
    (
        "fault '…': edge …→… has no rate to divide in step …: expected another fault such as '…'",
        options(faults=["rate 0-1 /6 @8", "rate 0>1 50MB"]),
    ),
    *(
        (
            "state_dict: missing …, unknown …: expected the names of the model that was compiled; strict=False takes what fits",
            on_pipeline(lambda pipe, change=change: pipe.load_state_dict(change(pipe.state_dict()))),
        )
        for change in (lambda state: {}, lambda state: state | {"layers.9.weight": X})
    ),
    *(
        (
            "state_dict: … has shape …: expected …",
            on_pipeline(lambda pipe, value=value: load_anything(pipe, pipe.state_dict() | {"layers.0.bias": value})),
        )
        for value in (X, X[0].cpu().numpy(), None)
    ),
    (
        "state_dict: a …: expected a dict of tensors by their names in the model",
        on_pipeline(lambda pipe: load_anything(pipe, list(pipe.parameters()))),
    ),
    ("…: suffix '…': expected .json or .svg or .png", on_pipeline(lambda pipe: pipe.save_trace("trace.gif"))),
    ("…: there is no folder …", on_pipeline(lambda pipe: pipe.save_trace("no such folder/trace.json"))),
    ("pictures need matplotlib: pip install 'adaptra[viz]'", no_matplotlib),
    *(
        (
            "this pipeline is not compiled yet: give adaptra.compile example_inputs=, or run a first step",
            before_compiling(mistake),
        )
        for mistake in (
            lambda pipe: list(pipe.parameters()),
            lambda pipe: pipe.state_dict(),
            lambda pipe: pipe.load_state_dict({}),
            lambda pipe: pipe.eval_step(X),
            lambda pipe: pipe.plan,
            lambda pipe: pipe.events,
            lambda pipe: pipe.report(),
            lambda pipe: pipe.explain(),
            lambda pipe: pipe.timeline(),
        )
    ),
    (
        "this pipeline is compiled already: call adaptra.compile again for batches of another shape",
        on_pipeline(lambda pipe: pipe.build(X, Y)),
    ),
    ("no step has run yet", on_pipeline(lambda pipe: pipe.microbatch_losses)),
    ("no step has run yet: a timeline shows the last step", on_pipeline(lambda pipe: pipe.timeline())),
    *(
        ("this pipeline is closed: call adaptra.compile for another one", after_close(mistake))
        for mistake in (
            lambda pipe: pipe.step(X, Y),
            lambda pipe: pipe.eval_step(X),
            lambda pipe: pipe.timeline(),
            lambda pipe: pipe.save_trace("trace.json"),
        )
    ),
    (
        "this pipeline is closed: call adaptra.compile for another one",
        before_compiling(lambda pipe: (pipe.close(), pipe.step(X, Y))),
    ),
    *(
        (
            "this pipeline has failed and can't go on: close it, call adaptra.compile again and load the last checkpoint; it "
            "failed by …",
            after_failing(mistake),
        )
        for mistake in (
            lambda pipe: pipe.step(*EXAMPLES["gpt_tied"].rows(ROWS, seed=1)[::2]),
            lambda pipe: pipe.eval_step(*EXAMPLES["gpt_tied"].rows(ROWS, seed=1)[::2]),
            lambda pipe: pipe.save_trace("trace.json"),
        )
    ),
    ("…: not exchanged within … s", wait_too_long),
]


@pytest.mark.parametrize(("row", "mistake"), MISTAKES, ids=[f"{number}-{row[:40]}" for number, (row, _) in enumerate(MISTAKES)])
def test_every_mistake_is_told_as_documented(row: str, mistake: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:
        mistake()
    check_documented(type(caught.value).__name__, str(caught.value), row)


def test_a_model_that_cannot_be_captured_is_told_with_its_line() -> None:
    with pytest.raises(adaptra.errors.CaptureError, match=r"\(the model itself\) \(Branching\) at .*test_api\.py:\d+"):
        compiled(model=Branching())


def losses_of(pipe: adaptra.Pipeline, name: str, steps: range) -> list[torch.Tensor]:
    """The microbatches' losses of some steps with an optimizer's step after each."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found = []
    for step in steps:
        args, kwargs, targets = EXAMPLES[name].rows(ROWS, seed=step)
        pipe.step(args, targets, **kwargs)
        found.append(pipe.microbatch_losses)
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_refused_batch_changes_nothing() -> None:
    """Where all ranks are threads of this process, training goes on after a mistake as if it had not been made."""
    with compiled() as spoilt, compiled() as clean:
        first = losses_of(spoilt, "skip_mlp", range(2))
        for batch in ((X, Y[:4]), (X, Y[:, :3]), (X.double(), Y)):
            with pytest.raises(BatchError):
                spoilt.step(*batch)
            with pytest.raises(BatchError):
                spoilt.eval_step(*batch)
        with pytest.raises(BatchError):
            spoilt.step(X, None)
        found = first + losses_of(spoilt, "skip_mlp", range(2, 4))
        expected = losses_of(clean, "skip_mlp", range(4))
        assert all(map(torch.equal, found, expected))


def test_a_step_that_fails_says_where_and_ends() -> None:
    """The model's own error is raised, with rank, op and step; closing does not wait for anything, and the weights remain."""
    pipe = compiled("gpt_tied", stages=4)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    begun = time.monotonic()
    with pytest.raises(IndexError, match="out of range") as caught:
        pipe.step(*bad_tokens())
    assert caught.value.__notes__ == ["in step 0: rank 0 at 0F2"]
    pipe.close()
    assert time.monotonic() - begun < 100, "somebody waited for an op's own limit"
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_an_interrupt_ends_the_step_on_all_ranks() -> None:
    """Ctrl-C reaches the caller at once, though only one of the threads gets it, and nothing is left running."""
    others = {*threading.enumerate()}
    with compiled(options=adaptra.Options(emulate=adaptra.EmulatedDevice(2.0, 2.0, 2.0))) as pipe:
        main = threading.main_thread().ident
        assert main is not None
        # Who starts the tests in the background may have had SIGINT ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        begun = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pipe.step(X, Y)
        # A whole step takes more than 24 s.
        assert time.monotonic() - begun < 20
        signal.signal(signal.SIGINT, before)
        with pytest.raises(PipelineError, match="failed by KeyboardInterrupt"):
            pipe.step(X, Y)
    assert not [thread.name for thread in {*threading.enumerate()} - others if thread.name.startswith("adaptra")]


def test_the_first_step_compiles_where_no_example_was_given() -> None:
    with compiled(example_inputs=None) as lazy, compiled() as eager:
        lazily = [lazy.step(X, Y), lazy.step(X, Y)]
        assert lazily == [eager.step(X, Y), eager.step(X, Y)]
        assert list(lazy.state_dict()) == list(MLP.make().state_dict())


def test_closing_ends_all_threads_and_leaves_the_parameters() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    pipe = compiled(stages=4, options=adaptra.Options(faults=["delay 0-1 1ms"]))
    with pipe:
        pipe.step(X, Y)
    pipe.close()
    left = [thread.name for thread in threading.enumerate() if thread.ident not in before]
    assert not left
    assert len(list(pipe.parameters())) == 16 and all(parameter.grad is not None for parameter in pipe.parameters())
    assert pipe.plan.version == 0 and "stage" in pipe.report()
    pipe.load_state_dict(MLP.make(seed=7).state_dict())
    assert torch.equal(pipe.state_dict()["layers.0.weight"], MLP.make(seed=7).state_dict()["layers.0.weight"])


def test_two_pipelines_side_by_side_are_two() -> None:
    with compiled() as one, compiled(model=MLP.make(seed=1), stages=4) as other:
        mine = losses_of(one, "skip_mlp", range(2))
        theirs = losses_of(other, "skip_mlp", range(2))
    assert not any(map(torch.equal, mine, theirs))
    with compiled() as again:
        assert all(map(torch.equal, mine, losses_of(again, "skip_mlp", range(2))))


def test_keyword_arguments_and_a_model_that_returns_its_loss() -> None:
    (x, times), kwargs, _ = OPTIONS
    with compiled("options") as pipe:
        loss = pipe.step((x, times), **kwargs)
        parts = [
            EXAMPLES["options"].make()(x[rows], times, **{name: value[rows] for name, value in kwargs.items()})["loss"]
            for rows in (slice(k, k + 2) for k in range(0, ROWS, 2))
        ]
        assert torch.equal(pipe.microbatch_losses, torch.stack(parts).detach())
        assert torch.equal(loss, torch.stack(parts).mean().detach())
        assert pipe.eval_step((x, times), **kwargs) == loss


def test_a_checkpoint_goes_both_ways() -> None:
    """What a pipeline saves the plain model loads, and the other way round; strict=False takes what fits."""
    model = MLP.make(seed=3)
    with compiled() as pipe:
        pipe.load_state_dict(model.state_dict())
        assert all(torch.equal(value, pipe.state_dict()[name]) for name, value in model.state_dict().items())
        pipe.load_state_dict({"layers.0.bias": torch.ones(16), "unknown": X}, strict=False)
        assert torch.equal(pipe.state_dict()["layers.0.bias"], torch.ones(16))
        model.load_state_dict(pipe.state_dict())
        assert torch.equal(model.get_parameter("layers.0.bias"), torch.ones(16))
        with pytest.raises(adaptra.errors.StateError, match=r"layers\.7\.bias has shape \[3\]: expected \[16\]"):
            pipe.load_state_dict(MLP.make().state_dict() | {"layers.7.bias": torch.ones(3)})
        assert torch.equal(pipe.state_dict()["layers.0.bias"], torch.ones(16))


def test_the_explanation_is_of_what_was_measured_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that has healed since the plan was made is not what limits it; equations come on request."""
    with compiled(stages=4) as pipe:
        controller = pipe.session.workers[0].controller
        cost = pipe.plan.case.cost
        assert pipe.explain().startswith("plan 0, in the times for which it was made\n")
        monkeypatch.setattr(type(controller), "measured_cost", property(lambda _: cost.with_latency(1, 2, 0.5)))
        slow = pipe.explain()
        assert slow.startswith("plan 0, in the times measured last, which differ from those it was made for\n")
        assert "an edge 1→2 twice as fast" in slow
        monkeypatch.undo()
        assert "an edge 1→2 twice as fast" not in pipe.explain()
        assert "symbols, " not in slow and "symbols, " in pipe.explain(equations=True)


@pytest.mark.timed
def test_a_link_is_marked_as_slow_by_what_was_measured_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan for a slow link may go on after the link has healed. Nothing says any more that the link is slow."""
    with compiled(stages=4, options=adaptra.Options(emulate=adaptra.EmulatedDevice(0.02, 0.02, 0.02))) as pipe:
        controller, plan = pipe.session.workers[0].controller, pipe.plan
        of_slow = replace(plan, case=replace(plan.case, cost=plan.case.cost.with_latency(1, 2, 0.5)))
        monkeypatch.setattr(type(pipe), "plan", property(lambda _: of_slow))
        assert pipe.slow_edges == (), "the times measured last are those of a healthy link"
        monkeypatch.setattr(type(controller), "measured_cost", property(lambda _: None))
        assert pipe.slow_edges == ((1, 2),), "a rank that does not know them"
        pipe.step(X, Y)
        pipe.save_trace(tmp_path / "step.svg")
        drawn = (tmp_path / "step.svg").read_text(encoding="utf-8")
        assert "slow" not in drawn, "no message of this step was late"
        assert "ops sleep, as Options(emulate=... or faults=...) asks" in drawn
        assert "; ops sleep, as Options(" in pipe.report().partition("\nstep ")[2]


def test_the_report_ends_with_the_measured_time_and_the_tokens_or_samples_per_second() -> None:
    """Tokens are rows times length of whole numbers, of the last step's own shape; floating point inputs count rows."""
    length = 5
    tokens, targets = torch.randint(4, (ROWS, length)), torch.randn(ROWS, length, 3)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3))
    with compiled(model=model, example_inputs=(tokens, targets), loss=nn.functional.mse_loss) as pipe:
        assert pipe.last_step is None and pipe.report().endswith("\nno step of these stages measured yet\n")
        for rows in (ROWS, ROWS - 1):
            pipe.step(tokens[:rows], targets[:rows])
            found, timeline = pipe.last_step, pipe.timeline()
            assert found is not None and timeline is not None
            assert (found.samples, found.tokens, found.unit) == (rows, rows * length, "tokens")
            assert timeline.makespan <= found.seconds < 60 and found.per_second == rows * length / found.seconds
            rate = f"{1e3 * found.seconds:.1f} ms, {found.per_second:,.0f} tokens/s (rows × length of input)"
            assert f"\nstep {found.step}: {rate}\n" in pipe.report()
        assert found.step == 1
    with compiled() as pipe:
        pipe.step(X, Y)
        found = pipe.last_step
        assert found is not None and (found.samples, found.tokens) == (ROWS, None)
        assert f" {ROWS / found.seconds:,.0f} samples/s (rows of the batch)\n" in pipe.report()


def test_the_report_gives_the_times_of_the_stages_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled() as pipe:
        pipe.step(X, Y)
        controller, cost = pipe.session.workers[0].controller, pipe.plan.case.cost
        measured = replace(cost, forward=(cost.forward[0], 0.5), input_grad=(cost.input_grad[0], 0.25))
        monkeypatch.setattr(type(controller), "measured_cost", property(lambda _: measured))
        *_, what, heading, row = pipe.report().splitlines()
    assert what == "measured per microbatch:" and heading.split("  ")[0] == "stage"
    assert row.split() == ["1", "500.000", "250.000", f"{1e3 * cost.weight_grad[1]:.3f}"]


def test_what_there_is_to_see(tmp_path: Path) -> None:
    """The table, the explanation, the events, and the pictures and trace of a measured step."""
    with compiled(stages=4) as pipe:
        assert pipe.plan.version == 0 and pipe.slow_edges == () and pipe.rank == 0
        table, explained = pipe.report(), pipe.explain()
        assert all(f"{stage}" in table for stage in range(4)) and "no plan beats" in explained
        pipe.step(X, Y)
        timeline = pipe.timeline()
        assert timeline is not None and sum(len(ops) for ops in timeline.ops) == 4 * 3 * MICROBATCHES
        assert len(timeline.messages) == 2 * 3 * MICROBATCHES and timeline.makespan > 0
        for suffix in ("json", "svg", "png"):
            pipe.save_trace(tmp_path / f"step.{suffix}")
        assert all(event.rank == 0 for event in pipe.events)
    assert (tmp_path / "step.svg").read_text().rstrip().endswith("</svg>")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert '"0F3"' in (tmp_path / "step.json").read_text()
