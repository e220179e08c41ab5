"""A small model of real text that many lanes train at once, each with its own parameters, learning rate or data.

A lane is one training. All lanes take the same microbatches by number. The model predicts the
next byte from the bytes before: a layer, tanh, and a layer that gives logits. Each byte enters as a fixed random code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import standard_library_text

CONTEXT, CODE, HIDDEN, SYMBOLS = 6, 8, 48, 64
"""Bytes before the predicted one, numbers of a byte's code, the model's width, and how many bytes it tells apart."""
INPUTS: Final = CONTEXT * CODE
STAGE_ENDS: Final = ((INPUTS + 1) * HIDDEN, (INPUTS + 1) * HIDDEN + (HIDDEN + 1) * SYMBOLS)
"""Where the parameters of each stage end: the two layers with their biases."""
_HELD_OUT = 2048
"""Rows whose loss is taken; no training takes them."""


class TextTask:
    """The text, the model's loss and its gradient.

    Args:
        rows: The rows of a microbatch.
        noise: The share of rows in training whose next byte is drawn at random instead. More noise, the same task.
        limit: The bytes of text.
    """

    def __init__(self, rows: int, noise: float = 0.0, limit: int = 1_000_000) -> None:
        self.rows, self._noise = rows, noise
        text = standard_library_text(limit)
        common = torch.bincount(text, minlength=256).argsort(descending=True)
        symbols = torch.full((256,), SYMBOLS - 1)
        symbols[common[: SYMBOLS - 1]] = torch.arange(SYMBOLS - 1)
        self._text = symbols[text]
        chance = torch.Generator().manual_seed(0)
        self._codes = torch.randn(SYMBOLS, CODE, generator=chance)
        places = torch.randperm(len(text) - CONTEXT, generator=chance)
        self._places, held_out = places[_HELD_OUT:], places[:_HELD_OUT]
        self._held_out = self._inputs(held_out), self._text[held_out + CONTEXT]
        self._orders = dict[int, Tensor]()

    def start(self, seeds: Sequence[int]) -> Tensor:
        """Return the first parameters of each seed, one row each."""
        rows: list[Tensor] = []
        for seed in seeds:
            chance = torch.Generator().manual_seed(1000 + seed)
            first = torch.randn(INPUTS, HIDDEN, generator=chance) / INPUTS**0.5
            second = torch.randn(HIDDEN, SYMBOLS, generator=chance) / HIDDEN**0.5 / 4
            rows.append(torch.cat([first.flatten(), torch.zeros(HIDDEN), second.flatten(), torch.zeros(SYMBOLS)]))
        return torch.stack(rows)

    def batch(self, seed: int, microbatches: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of microbatches, by their numbers. No row is in two microbatches."""
        if seed not in self._orders:
            chance = torch.Generator().manual_seed(2000 + seed)
            self._orders[seed] = self._places[torch.randperm(len(self._places), generator=chance)]
        order = self._orders[seed]
        numbers = (microbatches[:, None] * self.rows + torch.arange(self.rows)).flatten()
        places = order[numbers % len(order)]
        targets = self._text[places + CONTEXT]
        if self._noise:
            # What is drawn depends on the row alone, so that all modes see the same text.
            drawn = (places * 7919 + seed * 104729) % 10007
            targets = torch.where(drawn < self._noise * 10007, drawn * 31 % SYMBOLS, targets)
        return self._inputs(places), targets

    def gradient(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient of each lane's summed loss.

        Args:
            parameters: (lanes, parameters).
            inputs: (lanes, rows, inputs); one lane stands for all.
            targets: (lanes, rows), or one lane.
        """
        first, first_bias, second, second_bias = _layers(parameters)
        inputs = inputs.expand(len(parameters), -1, -1)
        hidden = torch.baddbmm(first_bias, inputs, first).tanh_()
        off = torch.baddbmm(second_bias, hidden, second).softmax(2)
        off.scatter_add_(2, targets.expand(len(parameters), -1)[..., None], torch.full((*off.shape[:2], 1), -1.0))
        back = (off @ second.mT).mul_(1 - hidden * hidden)
        parts = inputs.mT @ back, back.sum(1), hidden.mT @ off, off.sum(1)
        return torch.cat([part.flatten(1) for part in parts], 1)

    def loss(self, parameters: Tensor) -> Tensor:
        """Return each lane's mean loss on the held-out rows, in nats per byte."""
        inputs, targets = self._held_out
        return torch.stack([self._loss(one[None], inputs, targets) for one in parameters])

    def _loss(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        first, first_bias, second, second_bias = (layer[0] for layer in _layers(parameters))
        logits = torch.addmm(second_bias, torch.addmm(first_bias, inputs, first).tanh(), second)
        return functional.cross_entropy(logits, targets)

    def check_gradient(self) -> None:
        """Compare the gradient with that of autograd, once."""
        parameters = self.start([0, 1]).requires_grad_()
        inputs, targets = self.batch(0, torch.arange(3))
        for lane in range(2):
            loss = self._loss(parameters[lane : lane + 1], inputs, targets) * len(targets)
            (wanted,) = torch.autograd.grad(loss, parameters)
            found = self.gradient(parameters.detach(), inputs[None], targets[None])
            torch.testing.assert_close(found[lane], wanted[lane], rtol=1e-4, atol=1e-4)

    def _inputs(self, places: Tensor) -> Tensor:
        return self._codes[self._text[places[:, None] + torch.arange(CONTEXT)]].flatten(1)


def _layers(parameters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weights and biases of both layers, as views."""
    sizes = INPUTS * HIDDEN, HIDDEN, HIDDEN * SYMBOLS, SYMBOLS
    first, first_bias, second, second_bias = parameters.split(sizes, 1)
    return (
        first.unflatten(1, (INPUTS, HIDDEN)),
        first_bias[:, None],
        second.unflatten(1, (HIDDEN, SYMBOLS)),
        second_bias[:, None],
    )


class LaneOptimizer:
    """SGD, with or without momentum, or Adam, of all lanes; each has its own learning rate.

    Args:
        rates: The learning rate of each lane, of a shape that multiplies parameters.
        momentum: Of SGD.
        nesterov: Whether momentum is Nesterov's.
        adam: Adam in place of SGD, with its usual constants.
    """

    def __init__(self, rates: Tensor, momentum: float = 0.0, *, nesterov: bool = False, adam: bool = False) -> None:
        self._rates, self._momentum, self._nesterov, self._adam = rates, momentum, nesterov, adam
        self._first = self._second = torch.zeros(())
        self._steps = 0

    def change(self, parameters: Tensor, gradient: Tensor) -> Tensor:
        """Return the parameters after a step."""
        self._steps += 1
        if self._adam:
            self._first = 0.9 * self._first + 0.1 * gradient
            self._second = 0.999 * self._second + 0.001 * gradient * gradient
            first, second = self._first / (1 - 0.9**self._steps), self._second / (1 - 0.999**self._steps)
            return parameters - self._rates * first / (second.sqrt() + 1e-8)
        if self._momentum:
            self._first = self._momentum * self._first + gradient
            gradient = gradient + self._momentum * self._first if self._nesterov else self._first
        return parameters - self._rates * gradient
