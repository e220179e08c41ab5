"""Text of varying length, padded batch by batch, trains as in one process, bitwise; a short batch ends each epoch."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from paths import EXAMPLES
from script_pairs import losses_of_pipeline, losses_of_plain

PAIR = "variable_length"
SENTENCES = "22"


@pytest.mark.processes
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    expected = losses_of_plain(PAIR, tmp_path, "--sentences", SENTENCES)
    assert losses_of_pipeline(PAIR, tmp_path, 2, "--sentences", SENTENCES) == expected
    assert len(expected) == 6 and expected[-1] < expected[0] < 1.1 * math.log(256)


def test_the_plain_steps_are_those_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a batch is the mean over its labels, whatever its parts; batches differ in length and in rows."""
    monkeypatch.syspath_prepend(str(EXAMPLES / PAIR))
    monkeypatch.delitem(sys.modules, "task", raising=False)
    import task  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model, sizes, means = task.Transformer(), set(), 0
    for inputs, labels in task.loader(int(SENTENCES)):
        sizes.add(tuple(inputs.shape))
        model.zero_grad()
        loss = task.accumulate(model, inputs, labels)
        found = {name: one.grad for name, one in model.named_parameters()}
        model.zero_grad()
        expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        wanted = {name: one.grad for name, one in model.named_parameters()}
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            parts = zip(inputs.tensor_split(task.PARTS), labels.tensor_split(task.PARTS), strict=True)
            sums = [task.sum_and_count(model(some), one) for some, one in parts]
            means += not torch.isclose(torch.stack([total / count for total, count in sums]).mean(), expected, rtol=1e-5)
    assert {rows for rows, _ in sizes} == {6, 8} and len({length for _, length in sizes}) == 2
    assert means, "the mean of the parts' means is another number, so parts have unequally many labels"
    monkeypatch.delitem(sys.modules, "task")
