"""Small models that tests train, each with a function that makes a batch of any number of rows from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]


@dataclass(frozen=True)
class Example:
    """A model, its loss, and its batches: ``batch(rows, seed)`` gives (args, kwargs, targets)."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Any], Tensor] | None

    def make(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """A fresh model with the same weights for the same seed; the global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(dtype)

    def rows(self, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
        """A batch whose floating-point tensors are of ``dtype``."""
        return tree_map(
            lambda one: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one, self.batch(count, seed)
        )


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (one.view(rows, length, self.heads, -1).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(rows, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A byte-level GPT."""

    def __init__(
        self, blocks: int = 4, width: int = 32, heads: int = 4, length: int = 16, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SkipMLP(nn.Module):
    """Skip connections that reach over several layers, some from the same tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        second = torch.tanh(self.layers[1](first)) * first
        third = torch.tanh(self.layers[2](second)) + first * 0.5
        fourth = torch.tanh(self.layers[3](third)) + first
        fifth = torch.tanh(self.layers[4](fourth)) * second
        sixth = torch.tanh(self.layers[5](fifth)) + first / 3 + x
        return self.layers[7](torch.tanh(self.layers[6](sixth)) + first * second)


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels * stride, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels * stride)
        self.conv2 = nn.Conv2d(channels * stride, channels * stride, 3, 1, 1)
        self.norm2 = nn.BatchNorm2d(channels * stride)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Conv2d(channels, channels * stride, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.short(x)
        return self.relu(out)


class ResNet(nn.Module):
    """BatchNorm (statistics of each microbatch), changes in place, convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(Residual(8), Residual(8, 2), Residual(16), Residual(16, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).mean((2, 3)))


class Options(nn.Module):
    """Several inputs: an integer, a boolean, a mask by keyword, and what is left at its default."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.fourth = nn.Linear(width, 1)

    def forward(
        self, x: Tensor, times: int, double: bool = False, *, mask: Tensor | None = None, index: Tensor | None = None
    ) -> dict[str, Tensor]:
        for _ in range(times):
            x = torch.relu(self.first(x))
        x = self.second(x) * (2.0 if double else 1.0)
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        y = torch.sigmoid(self.third(x))
        if index is not None:
            y = y + x.gather(1, index)
        out = self.fourth(y).squeeze(1)
        return {"loss": out.square().mean(), "out": out}


class FrozenUpstream(nn.Module):
    """The first half is frozen, as when only the end of a model is tuned."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))
        for layer in list(self.layers)[:4]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Views(nn.Module):
    """Linear layers on tensors with three dimensions, transposed in between, so that stages end in views."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).transpose(1, 2)
        return x


class Inplace(nn.Module):
    """Changes a slice in place, counts its calls in a buffer that scales the result, and detaches a branch."""

    calls: Tensor
    table: Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.unused = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.table
        x = torch.tanh(x)
        y = x.clone()
        y[:, :2] *= 3.0
        y[:, 2].add_(x[:, 1])
        x = self.layers[1](y) + y.detach() + self.table
        self.calls.add_(1.0)
        x = self.layers[2](x) * self.calls
        with torch.no_grad():
            scale = x.abs().mean()
        return self.layers[3](x / scale) * self.table


class TiedTwice(nn.Module):
    """One weight used by the first layer, in the middle, and twice at the end."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.inner[1](torch.tanh(self.inner[0](x)))
        x = self.first(x) + x
        x = self.inner[3](torch.tanh(self.inner[2](x)))
        return self.last(torch.tanh(self.last(x)))


class TiedBlock(nn.Module):
    """A layer of its own and then any number of uses of a weight that all blocks share."""

    def __init__(self, weight: nn.Parameter, uses: Sequence[str]) -> None:
        super().__init__()
        width = weight.shape[0]
        self.layer = nn.Linear(width, width)
        self.weight = weight
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        for use in self.uses:
            match use:
                case "layer":
                    x = torch.tanh(F.linear(x, self.weight)) + x
                case "both arguments":
                    x = x @ (self.weight * self.weight) + x
                case "all steps":
                    hidden, weights = torch.zeros_like(x[:1]), [self.weight, self.weight]
                    run: Any = torch.rnn_tanh  # whose stub has no weights of one layer alone
                    x = run(x.unsqueeze(1), hidden.unsqueeze(0), weights, False, 1, 0.0, False, False, False)[0]
                    x = x.squeeze(1)
                case _:
                    x = F.linear(x, self.weight).detach() + x
        return x


TIED_USES = ("layer", "layer", "both arguments", "all steps", "without gradient")
"""Ways to use the shared weight: by one op, twice by one op, many times by one call, and without a gradient."""


class TiedBlocks(nn.Module):
    """One weight used by each block in the ways that are named for it."""

    def __init__(self, uses: Sequence[Sequence[str]], width: int = 8) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(width, width) * 0.3)
        self.blocks = nn.ModuleList(TiedBlock(weight, one) for one in uses)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Noise(nn.Module):
    """Random numbers of several kinds in every layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), 0.3, self.training)
            if self.training:
                x = x + 0.1 * torch.randn_like(x) * torch.rand(x.shape[-1], dtype=x.dtype, device=x.device)
        return x


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def square_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(rows: int, seed: int) -> Batch:
    drawn = torch.randint(0, 256, (rows, 17), generator=generator(seed))
    return (drawn[:, :-1].contiguous(),), {}, drawn[:, 1:].contiguous()


def vectors(width: int) -> Callable[[int, int], Batch]:
    def batch(rows: int, seed: int) -> Batch:
        drawn = torch.randn(2, rows, width, generator=generator(seed))
        return (drawn[0],), {}, drawn[1]

    return batch


def images(rows: int, seed: int) -> Batch:
    source = generator(seed)
    return (torch.randn(rows, 3, 8, 8, generator=source),), {}, torch.randint(0, 10, (rows,), generator=source)


def matrices(rows: int, seed: int) -> Batch:
    drawn = torch.randn(2, rows, 6, 6, generator=generator(seed))
    return (drawn[0],), {}, drawn[1]


def options(rows: int, seed: int) -> Batch:
    source = generator(seed)
    mask = torch.rand(rows, 8, generator=source) < 0.2
    index = torch.randint(0, 8, (rows, 8), generator=source)
    return (torch.randn(rows, 8, generator=source), 2), {"mask": mask, "index": index}, None


def tied_blocks(stages: int, seed: int) -> Example:
    """One block for each stage, each of which uses the shared weight in one to three of the ways, drawn from the seed."""
    draw = random.Random(seed)
    uses = [draw.choices(TIED_USES, k=draw.randint(1, 3)) for _ in range(stages)]
    return Example(f"tied_blocks {seed}", lambda: TiedBlocks(uses), vectors(8), square_loss)


def begin_blocks(stages: int) -> list[str]:
    """The split that puts each block of :func:`tied_blocks` on a stage of its own."""
    return [f"blocks.{index}" for index in range(1, stages)]


EXAMPLES = {
    one.name: one
    for one in (
        Example("gpt", GPT, tokens, token_loss),
        Example("gpt_tied", lambda: GPT(tied=True), tokens, token_loss),
        Example("gpt_dropout", lambda: GPT(blocks=2, dropout=0.2), tokens, token_loss),
        Example("skip_mlp", SkipMLP, vectors(16), square_loss),
        Example("resnet", ResNet, images, class_loss),
        Example("options", Options, options, None),
        Example("frozen_upstream", FrozenUpstream, vectors(8), square_loss),
        Example("views", Views, matrices, square_loss),
        Example("inplace", Inplace, vectors(6), square_loss),
        Example("tied_twice", TiedTwice, vectors(8), square_loss),
        Example("noise", Noise, vectors(8), square_loss),
    )
}
