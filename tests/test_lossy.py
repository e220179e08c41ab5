"""Options(lossy_bf16=True): messages are rounded as torch rounds, and nothing else is; what can't be is refused at the door."""

import pytest
import torch
from errors_table import check_documented
from installed import install_transport
from models import Example, square_loss, vectors
from processes import run_processes
from torch import nn
from training import call, compiled, differences, train, train_alone

import adaptra
from adaptra.errors import OptionError

ROWS, MICROBATCHES, WIDTH = 16, 4, 128
FOREIGN = "lossy_bf16=True with transport '…': expected a transport of adaptra's own, which all can round"


class Two(nn.Module):
    """Two layers; between them what a boundary that rounds does to activations, and autograd with it to their gradients."""

    def __init__(self, rounds):
        super().__init__()
        self.rounds = rounds
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.rounds:
            x = x.to(torch.bfloat16).to(torch.float32)
        return self.last(x)


def example(rounds):
    return Example("two", lambda: Two(rounds), vectors(WIDTH), square_loss)


def train_rounded(rank, transports):
    """What differs from one process whose model rounds at the boundary, per transport; the report, and whether it is exact."""
    if transports != ["local"]:
        torch.distributed.init_process_group("gloo")
    batches = [example(False).rows(ROWS, seed) for seed in range(3)]
    expected, exact = (train_alone(example(rounds), batches, MICROBATCHES) for rounds in (True, False))
    found = {}
    for transport in transports:
        with compiled(
            example(False),
            batches[0],
            stages=2,
            microbatches=MICROBATCHES,
            split=["last"],
            transport=transport,
            options=adaptra.Options(lossy_bf16=True),
        ) as pipe:
            steps = train(pipe, batches)
            is_whole = transport == "local"
            is_exact = not differences(steps, exact, is_whole)
            evaluated = float(pipe.eval_step(*call(batches[0])[0]))
            found[transport] = differences(steps, expected, is_whole), is_exact, pipe.report(), evaluated
    return found


def check(found):
    for differing, is_exact, report, _ in found.values():
        assert differing == [] and not is_exact
        # Four rows of 128 numbers of two bytes, not four.
        assert "messages are rounded to bfloat16" in report and "1.02 kB" in report and "2.05 kB" not in report


def test_what_stages_send_each_other_is_rounded_as_torch_rounds():
    check(train_rounded(0, ["local"]))


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_it_is_rounded_the_same_between_processes():
    ranks = run_processes(train_rounded, 2, ["c10d", "delegate"], timeout=110)
    for found in ranks:
        check(found)
    ((_, _, _, by_c10d), (_, _, _, by_delegate)) = ranks[0].values()
    assert by_c10d == by_delegate


def test_without_the_option_the_report_says_nothing_and_nothing_is_rounded():
    batch = example(False).rows(ROWS, 0)
    with compiled(example(False), batch, stages=2, microbatches=MICROBATCHES, split=["last"]) as pipe:
        assert differences(train(pipe, [batch]), train_alone(example(False), [batch], MICROBATCHES)) == []
        assert "rounded" not in pipe.report() and "2.05 kB" in pipe.report()


def test_a_transport_of_another_package_is_refused(tmp_path, monkeypatch):
    install_transport(tmp_path, "pigeon", "pigeon:make")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError) as caught:
        adaptra.compile(Two(False), stages=2, microbatches=4, transport="pigeon", options=adaptra.Options(lossy_bf16=True))
    check_documented("OptionError", str(caught.value), FOREIGN)
