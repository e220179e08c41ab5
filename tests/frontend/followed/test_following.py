"""A table of kinds of changes after the compilation: each is followed to the bit, or refused in words."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Generator
from typing import Any

import changed
import pytest
import torch
from changed import Loss, batch, enclosed, partly, state_of, train_alone
from errors_table import check_documented
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

import adaptra
from adaptra.errors import AdaptraError, CaptureError, PipelineError
from adaptra.frontend.followed.following import Following
from adaptra.frontend.followed.watch import Watch

Change = Callable[[Any, Any], object]


class Pair:
    """A pipeline and a plain model, changed alike and compared after every step."""

    def __init__(self, loss: Any = None, other_loss: Any = None, **how: Any) -> None:
        self.model: Any = changed.model()
        self.plain: Any = copy.deepcopy(self.model)
        self.loss = Loss() if loss is None else loss
        self.other_loss = Loss() if loss is None else other_loss
        self.pipe = adaptra.compile(
            how.pop("given", self.model),
            stages=how.pop("stages", 2),
            microbatches=changed.MICROBATCHES,
            example_inputs=batch(),
            loss=self.loss,
            **how,
        )
        self.ours = torch.optim.SGD(self.pipe.parameters(), lr=0.05, momentum=0.9)
        self.theirs = torch.optim.SGD(self.plain.parameters(), lr=0.05, momentum=0.9)
        self.steps = 0

    def step(self, what: str = "", rows: int = 8) -> None:
        self.steps += 1
        given = batch(self.steps, rows)
        loss, alone = self.pipe.step(*given), train_alone(self.plain, self.other_loss, *given)
        assert torch.equal(loss, alone), what
        assert_same(state_of(self.model), state_of(self.plain), what)
        for one in (self.ours, self.theirs):
            one.step()
            one.zero_grad()

    def change(self, what: str, change: Change) -> None:
        """Change both alike, and train both."""
        before = len(self.changes)
        change(self.model, self.loss)
        if not what.startswith("class") and not what.startswith("global"):
            change(self.plain, self.other_loss)
        self.step(what)
        assert len(self.changes) == before + 1, what
        self.step(what)
        assert len(self.changes) == before + 1, what

    @property
    def changes(self) -> list[str]:
        return [one.text for one in self.pipe.events if "a changed model" in one.text]


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    assert ours.keys() == theirs.keys(), (what, ours.keys() ^ theirs.keys())
    assert not [name for name, one in ours.items() if not torch.equal(one, theirs[name])], what


@pytest.fixture
def pair() -> Generator[Pair]:
    made = Pair()
    with made.pipe:
        made.step()
        yield made


def halve(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 0.5


def double(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one * 2 for one in given)


def tripled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: type(module).forward(module, x) * 3


def set_value(name: str, value: Any) -> Change:
    def change(model: Any, _: Any) -> None:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, value)

    return change


VALUES: dict[str, Change] = {
    "plain attribute": set_value("1.scale", 2.0),
    "the same number of another type": set_value("2.scale", 3),
    "number in a list": lambda model, _: model[1].numbers.__setitem__(0, 0.5),
    "number in a dict in a list": lambda model, _: model[2].numbers[1].update(inner=0.25),
    "attribute of a config": lambda model, _: setattr(model[0].config, "temperature", 4.0),
    "attribute of a config's config": lambda model, _: setattr(model[3].config.deeper, "power", 0.5),
    "another list": set_value("3.numbers", [0.5, {"inner": 2.0}]),
    "another function": set_value("1.activation", torch.sigmoid),
    "another plain tensor": lambda model, _: setattr(model[2], "mask", torch.full((8,), 0.5)),
    "number of the loss": lambda _, loss: setattr(loss, "beta", 0.1),
    "tensor of the loss": lambda _, loss: setattr(loss, "weights", torch.arange(8.0)),
    "part in evaluation mode": lambda model, _: model[1].norm.eval(),
    "training mode again": lambda model, _: model.train(),
    "class attribute": lambda model, _: setattr(type(model[0]), "shift", 0.25),
    "global": lambda _, __: setattr(changed, "OFFSET", 0.125),
}


def test_values_are_followed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed.Part, "shift", 0.0)
    monkeypatch.setattr(changed, "OFFSET", 0.0)
    for what, change in VALUES.items():
        pair.change(what, change)
    assert "1.scale: 1.0 → 2.0" in pair.changes[0]


def test_dropout_is_followed() -> None:
    pair = Pair()
    with pair.pipe:
        pair.step()
        pair.model[1].drop.p = 0.5
        given = batch(7)
        assert not torch.equal(pair.pipe.step(*given), train_alone(copy.deepcopy(pair.plain), pair.other_loss, *given))
        pair.model.load_state_dict(pair.plain.state_dict())
        pair.ours.zero_grad()
        pair.model[1].drop.p = 0.0
        pair.step("dropout off")


def replaced_layer(model: Any, _: Any) -> None:
    torch.manual_seed(5)
    model[1].linear = nn.Linear(8, 8)


STATE: dict[str, Change] = {
    "a layer is frozen": lambda model, _: model[0].linear.requires_grad_(False),
    "the first stage is frozen": lambda model, _: model[:2].requires_grad_(False),
    "all is trained again": lambda model, _: model.requires_grad_(True),
    "one bias alone is frozen": lambda model, _: model[2].linear.bias.requires_grad_(False),
    "another module": replaced_layer,
    "another parameter": lambda model, _: setattr(model[2].norm, "weight", nn.Parameter(torch.full((8,), 0.5))),
    "another buffer": lambda model, _: setattr(model[3], "gain", torch.full((8,), 2.0)),
    "assigned state": lambda model, _: model.load_state_dict(
        {name: one.detach() * 0.5 for name, one in model.state_dict().items()}, assign=True
    ),
}


def test_flags_and_state_are_followed(pair: Pair) -> None:
    for what, change in STATE.items():
        pair.change(what, change)


def test_what_changes_in_place_costs_nothing(pair: Pair) -> None:
    for model in (pair.model, pair.plain):
        model[0].gain.fill_(0.5)
        model[1].mask.fill_(0.25)
        model.load_state_dict({name: one * 0.75 for name, one in model.state_dict().items()})
    for loss in (pair.loss, pair.other_loss):
        loss.weights.fill_(3.0)
    pair.step("in place")
    assert not pair.changes


def test_a_frozen_parameter_keeps_its_gradient_until_it_is_cleared_and_its_w_is_gone(pair: Pair) -> None:
    work = sum(one.flops.weight_grad for one in pair.pipe.session.compiled.train)
    for pipeline, model in ((pair.pipe.step, pair.model), (None, pair.plain)):
        given = batch(3)
        pipeline(*given) if pipeline is not None else train_alone(model, pair.other_loss, *given)
        model[2].requires_grad_(False)
    assert pair.model[2].linear.weight.grad is not None
    pair.step("frozen with a gradient")
    assert pair.model[2].linear.weight.grad is None
    pair.step("frozen")
    assert sum(one.flops.weight_grad for one in pair.pipe.session.compiled.train) < work


def test_parameters_of_the_pipeline_are_followed_and_a_deleted_model_is_too(pair: Pair) -> None:
    def freeze(of: Any, value: bool) -> None:
        for name, one in of.named_parameters():
            if name.startswith("1."):
                one.requires_grad_(value)

    freeze(pair.pipe, False)
    freeze(pair.plain, False)
    pair.step("frozen by the pipeline's names")
    named, plain = dict(pair.pipe.named_parameters()), pair.plain
    del pair.model
    for value in (True, False):
        freeze(pair.pipe, value)
        freeze(plain, value)
        given = batch(9)
        loss = pair.pipe.step(*given)
        assert torch.equal(loss, train_alone(plain, pair.other_loss, *given))
        for name, one in plain.named_parameters():
            assert (named[name].grad is None) == (one.grad is None), name
            other = named[name].grad
            assert one.grad is None or (other is not None and torch.equal(one.grad, other)), name
        for one in (pair.ours, pair.theirs):
            one.step()
            one.zero_grad()


def test_a_model_that_frees_its_memory_is_no_change_and_is_watched_on(pair: Pair) -> None:
    """As PipelineTrainer does: the pipeline has the tensors, and the model on the meta device still says what is trained."""
    pair.model.to("meta")
    assert torch.equal(pair.pipe.step(*batch(3)), train_alone(pair.plain, pair.other_loss, *batch(3)))
    assert not pair.changes
    for model in (pair.model, pair.plain):
        model[1].drop.p = 0.0
        model[2].scale = 2.0
    for given in (batch(4), batch(5, rows=12)):  # the second is another shape, which is compiled from the changed model
        assert torch.equal(pair.pipe.step(*given), train_alone(pair.plain, pair.other_loss, *given))
    assert len(pair.changes) == 1


def test_hooks_and_other_forwards_are_followed(pair: Pair) -> None:
    handles: list[Any] = []

    def hooked(register: str, hook: Any) -> Change:
        return lambda model, _: handles.append(getattr(model[1], register)(hook))

    def removed(_: Any, __: Any) -> None:
        handles.pop().remove()

    pair.change("forward hook", hooked("register_forward_hook", halve))
    pair.change("second hook", hooked("register_forward_pre_hook", double))
    pair.change("pre-hook removed", removed)
    pair.change("hook removed", removed)
    pair.change("other forward", lambda model, _: setattr(model[2], "forward", tripled(model[2])))
    pair.change("forward of the class", lambda model, _: delattr(model[2], "forward"))
    handle = torch_modules.register_module_forward_hook(
        lambda module, _, out: out * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        pair.step("hook of all modules")
    finally:
        handle.remove()
    assert "_global_forward_hooks" in pair.changes[-1]


@pytest.mark.parametrize("kind", ["closure", "partial", "module", "default"])
def test_kinds_of_losses_are_followed(kind: str) -> None:
    set_factor: list[Any] = []

    def made() -> Any:
        if kind == "closure":
            loss, setter = enclosed()
            set_factor.append(setter)
            return loss
        if kind == "default":
            return lambda outputs, targets, weights=[1.0]: changed.smooth(outputs, targets) * weights[0]
        return partly() if kind == "partial" else nn.SmoothL1Loss()

    def change(_: Any, loss: Any) -> None:
        match kind:
            case "closure":
                set_factor.pop()(0.1)
            case "default":
                loss.__defaults__[0][0] = 0.25
            case "partial":
                loss.keywords["beta"] = 0.1
            case _:
                loss.beta = 0.1

    pair = Pair(made(), made())
    with pair.pipe:
        pair.step()
        pair.change(kind, change)


def test_what_has_no_effect_restarts_nothing(pair: Pair) -> None:
    worker = pair.pipe.session.workers[0]
    pair.model.best_loss = 0.5
    pair.model[1].scale = 1.0  # an equal number
    pair.step()
    assert pair.pipe.session.workers[0] is worker
    assert not pair.changes


def test_other_shapes_and_evaluation_follow_too(pair: Pair) -> None:
    pair.step(rows=16)
    for model in (pair.model, pair.plain):
        model[3].scale = 0.5
    given = batch(2)
    pair.plain.eval()
    with torch.no_grad():
        expected = torch.cat([pair.plain(one) for one in given[0].chunk(changed.MICROBATCHES)])
    pair.plain.train()
    assert torch.equal(pair.pipe.eval_step(given[0]), expected)
    pair.step(rows=16)
    pair.step(rows=8)
    assert len(pair.changes) == 1
    pair.model.eval()  # for a validation of the plain model
    pair.pipe.eval_step(given[0])
    pair.model.train()
    pair.step()
    assert len(pair.changes) == 1


CHANGED = "the model has changed since adaptra.compile (…): …"
OTHER_NAMES = (
    "the model has changed since adaptra.compile (…): it has other parameters or buffers now, or ties them in another way: …: "
    "expected those of before; call adaptra.compile again, with a new optimizer"
)
MOVED = (
    "the model has changed since adaptra.compile (…): … is on another stage now: expected the stages of before; call "
    "adaptra.compile again, with a new optimizer"
)
FROZEN_TIE = (
    "the model has changed since adaptra.compile (…): … was frozen at adaptra.compile, and several stages use it: expected one "
    "that is trained from the begin, as each stage needs a copy that the optimizer has; call adaptra.compile again"
)
GONE = (
    "the model has changed since adaptra.compile (…): the model itself is gone: expected one that is kept, to be compiled anew"
)
PART_OF_GONE = (
    "the model is gone, and a part of it has changed: …: expected one that is kept where the loop changes it, as it is "
    "compiled anew then"
)
NOT_TRAINING = (
    "… was set to evaluation mode after adaptra.compile: expected training mode in a step; call train() of it, or eval() of "
    "the parts alone that stay as they are"
)
REFUSED: dict[str, tuple[Change, str, str]] = {
    "whole model in evaluation mode": (lambda model, _: model.eval(), "the model", NOT_TRAINING),
    "backward hook": (
        lambda model, _: model[1].register_full_backward_hook(lambda *_: None),
        "a backward hook of the module '1'",
        CHANGED,
    ),
    "a new parameter": (
        lambda model, _: model[2].register_parameter("extra", nn.Parameter(torch.ones(8))),
        "2.extra",
        OTHER_NAMES,
    ),
    "tied parameters": (
        lambda model, _: setattr(model[3].linear, "weight", model[0].linear.weight),
        "3.linear.weight",
        OTHER_NAMES,
    ),
    "nothing is trained": (
        lambda model, _: model.requires_grad_(False),
        "the loss depends on no trainable parameter",
        CHANGED,
    ),
    "what can't be captured": (set_value("1.activation", lambda x: x if x.sum() > 0 else -x), "(1.activation", CHANGED),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(what: str) -> None:
    change, text, row = REFUSED[what]
    pair = Pair()
    with pair.pipe:
        pair.step()
        before = state_of(pair.model)
        change(pair.model, pair.loss)
        with pytest.raises(AdaptraError, match=re.escape(text)) as raised:
            pair.pipe.step(*batch())
        check_documented(raised.type.__name__, str(raised.value), row)
        kept = {name: one for name, one in state_of(pair.model).items() if name in before and what != "tied parameters"}
        assert_same(kept, {name: one for name, one in before.items() if name in kept}, what)


class WithSpare(nn.Module):
    """Uses a layer of the first stage in the last one, if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)
        self.parts = changed.model()
        self.is_used = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.parts(x)
        return hidden + self.spare(hidden) if self.is_used else hidden


def tied_and_frozen() -> Any:
    model: Any = changed.model()
    model[3].linear.weight = model[0].linear.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "change", "row"),
    [
        (WithSpare, lambda model: setattr(model, "is_used", True), MOVED),
        (tied_and_frozen, lambda model: model.requires_grad_(True), FROZEN_TIE),
    ],
)
def test_state_that_other_stages_need_is_refused(model: Any, change: Any, row: str) -> None:
    made = model()
    with adaptra.compile(made, stages=2, microbatches=4, example_inputs=batch(), loss=Loss()) as pipe:
        pipe.step(*batch())
        change(made)
        with pytest.raises(CaptureError) as raised:
            pipe.step(*batch())
        check_documented(raised.type.__name__, str(raised.value), row)


def test_a_model_that_is_gone_and_has_no_copy_is_not_compiled(pair: Pair) -> None:
    following = Following(changed.model(), None, None, None, is_list=False, keeps=False)
    with pytest.raises(CaptureError) as raised:
        following.compiled("0.linear.weight", pair.pipe.session.compiled, [], [], [])
    check_documented(raised.type.__name__, str(raised.value), GONE)


def test_a_list_of_stages_is_followed() -> None:
    model: Any = changed.model()
    pair = Pair(given=[nn.Sequential(model[0], model[1]), nn.Sequential(model[2], model[3])])
    pair.model = model
    with pair.pipe:
        pair.step()
        for what in ("plain attribute", "number in a dict in a list", "number of the loss", "part in evaluation mode"):
            pair.change(what, VALUES[what])
        pair.change("a layer is frozen", STATE["a layer is frozen"])
        pair.change("another buffer", STATE["another buffer"])


def test_a_model_of_one_rank_of_several_is_freed_and_what_is_left_of_it_is_watched() -> None:
    model: Any = changed.model()
    model[0].others = [model[1], {"deep": [model[2].mask]}]
    left = model[3]
    kept = [weakref.ref(one) for one in (model, model[1], model[2].mask)]
    watch = Watch(model, Loss(), is_list=False, keeps=False)
    assert not watch.changes(evaluates=False)
    del model
    gc.collect()
    assert [one() for one in kept if one() is not None] == []
    assert not watch.changes(evaluates=False)
    left.scale = 2.0
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"3.scale: 1.0 → 2.0") as raised:
            watch.changes(evaluates=False)
        check_documented(raised.type.__name__, str(raised.value), PART_OF_GONE)


def test_changes_in_every_step_are_warned_of_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        pair.model[1].scale = pair.plain[1].scale = float(number)
        pair.step(str(number))
    assert sum("changes with every step" in one.getMessage() for one in caplog.records) == 1
