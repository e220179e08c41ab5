"""Results of ops on fake tensors have the strides of those on real ones, forward and backward, for inputs of any layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import adaptra
from adaptra.graph.ops.fake import fake_mode

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(4, 6, 8).transpose(1, 2),
    "swapped": lambda: torch.randn(8, 4, 6).transpose(0, 1),
    "columns": lambda: torch.randn(4, 8, 12)[..., ::2],
    "channels last": lambda: torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(4, 6, 8, 6).permute(0, 2, 3, 1),
    "sliced channels": lambda: torch.randn(4, 16, 6, 6)[:, ::2],
    "two dimensions": lambda: torch.randn(8, 4).t(),
}


def affine(width: int) -> tuple[Tensor, Tensor]:
    return torch.ones(width, requires_grad=True), torch.zeros(width, requires_grad=True)


def two(one: Tensor) -> list[int]:
    return [2] * (one.dim() - 2)


OPS: dict[str, Callable[[Tensor], Any]] = {
    "batch_norm": lambda one: functional.batch_norm(one, torch.zeros(8), torch.ones(8), *affine(8), training=True),
    "batch_norm evaluated": lambda one: functional.batch_norm(one, torch.zeros(8), torch.ones(8), *affine(8)),
    "instance_norm": lambda one: functional.instance_norm(one) if one.dim() > 2 else one,
    "layer_norm": lambda one: functional.layer_norm(one, one.shape[-1:], *affine(one.shape[-1])),
    "group_norm": lambda one: functional.group_norm(one, 2, *affine(8)),
    "rms_norm": lambda one: functional.rms_norm(one, one.shape[-1:]),
    "softmax": lambda one: functional.softmax(one, 1),
    "log_softmax": lambda one: functional.log_softmax(one, -1),
    "linear": lambda one: functional.linear(one, torch.ones(3, one.shape[-1], requires_grad=True)),
    "matmul": lambda one: one @ one.mT,
    "roll": lambda one: one.roll((1, 2), (0, 1)),
    "flip": lambda one: one.flip(1),
    "cat": lambda one: torch.cat([one, one], 1),
    "stack": lambda one: torch.stack([one, one], 1),
    "pad": lambda one: functional.pad(one, (1, 1)),
    "cumsum": lambda one: one.cumsum(1),
    "sort": lambda one: one.sort(1).values,
    "topk": lambda one: one.topk(2, 1).values,
    "gather": lambda one: one.gather(1, torch.zeros(one.shape, dtype=torch.long)),
    "index": lambda one: one[:, torch.zeros(2, dtype=torch.long)],
    "index_select": lambda one: one.index_select(1, torch.zeros(2, dtype=torch.long)),
    "masked_fill": lambda one: one.masked_fill(torch.zeros(one.shape, dtype=torch.bool), 0.0),
    "where": lambda one: torch.where(torch.zeros(one.shape, dtype=torch.bool), one, 2 * one),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "softplus": functional.softplus,
    "leaky_relu": functional.leaky_relu,
    "hardswish": functional.hardswish,
    "glu": lambda one: functional.glu(one, 1),
    "prelu": lambda one: functional.prelu(one, torch.ones(8, requires_grad=True)),
    "sum": lambda one: one.sum(1),
    "mean": lambda one: one.mean(1, keepdim=True) * one,
    "amax": lambda one: one.amax(1),
    "std": lambda one: one.std(1),
    "logsumexp": lambda one: one.logsumexp(1),
    "norm": lambda one: functional.normalize(one, dim=1),
    "cosine_similarity": lambda one: functional.cosine_similarity(one, 2 * one, 1),
    "repeat_interleave": lambda one: one.repeat_interleave(2, 1),
    "clone": lambda one: one.clone(),
    "contiguous": lambda one: one.contiguous(),
    "flatten": lambda one: one.flatten(1),
    "mse_loss": lambda one: functional.mse_loss(one, torch.zeros(one.shape)),
    "smooth_l1_loss": lambda one: functional.smooth_l1_loss(one, torch.zeros(one.shape), reduction="none"),
    "convolution": lambda one: (
        (functional.conv1d if one.dim() == 3 else functional.conv2d)(one, torch.ones(3, 8, *two(one), requires_grad=True))
        if one.dim() > 2
        else one
    ),
    "max_pool": lambda one: (
        (functional.max_pool1d if one.dim() == 3 else functional.max_pool2d)(one, 2) if one.dim() > 2 else one
    ),
    "avg_pool": lambda one: (
        (functional.avg_pool1d if one.dim() == 3 else functional.avg_pool2d)(one, 2) if one.dim() > 2 else one
    ),
    "adaptive_avg_pool": lambda one: (
        (functional.adaptive_avg_pool1d if one.dim() == 3 else functional.adaptive_avg_pool2d)(one, 2) if one.dim() > 2 else one
    ),
    "interpolate": lambda one: functional.interpolate(one, scale_factor=2) if one.dim() > 2 else one,
    "bilinear": lambda one: functional.interpolate(one, scale_factor=2, mode="bilinear") if one.dim() == 4 else one,
    "channel_shuffle": lambda one: functional.channel_shuffle(one, 2) if one.dim() > 2 else one,
    "pixel_shuffle": lambda one: functional.pixel_shuffle(one, 2) if one.dim() == 4 else one,
    "unfold": lambda one: functional.unfold(one, 2) if one.dim() == 4 else one,
    "attention": lambda one: functional.scaled_dot_product_attention(one, one, one) if one.dim() > 2 else one,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "elu": functional.elu,
    "selu": functional.selu,
    "celu": functional.celu,
    "mish": functional.mish,
    "sigmoid": functional.sigmoid,
    "tanh": functional.tanh,
    "logsigmoid": functional.logsigmoid,
    "hardsigmoid": functional.hardsigmoid,
    "hardtanh": functional.hardtanh,
    "softsign": functional.softsign,
    "tanhshrink": functional.tanhshrink,
    "softshrink": functional.softshrink,
    "hardshrink": functional.hardshrink,
    "threshold": lambda one: functional.threshold(one, 0.1, 0.0),
    "l1_loss": lambda one: functional.l1_loss(one, torch.zeros(one.shape)),
    "l1_loss of each": lambda one: functional.l1_loss(one, torch.zeros(one.shape), reduction="none"),
    "huber_loss": lambda one: functional.huber_loss(one, torch.zeros(one.shape)),
    "huber_loss of each": lambda one: functional.huber_loss(one, torch.zeros(one.shape), reduction="none"),
    "binary_cross_entropy": lambda one: functional.binary_cross_entropy(one, torch.zeros(one.shape)),
    "binary_cross_entropy of each": lambda one: functional.binary_cross_entropy(one, torch.zeros(one.shape), reduction="none"),
    "binary_cross_entropy_with_logits": lambda one: functional.binary_cross_entropy_with_logits(one, torch.zeros(one.shape)),
    "binary_cross_entropy_with_logits of each": lambda one: functional.binary_cross_entropy_with_logits(
        one, torch.zeros(one.shape), reduction="none"
    ),
    "kl_div": lambda one: functional.kl_div(one, torch.zeros(one.shape)),
    "kl_div of each": lambda one: functional.kl_div(one, torch.zeros(one.shape), reduction="none"),
    "soft_margin_loss": lambda one: functional.soft_margin_loss(one, torch.zeros(one.shape)),
    "soft_margin_loss of each": lambda one: functional.soft_margin_loss(one, torch.zeros(one.shape), reduction="none"),
    "poisson_nll_loss": lambda one: functional.poisson_nll_loss(one, torch.zeros(one.shape)),
    "poisson_nll_loss of each": lambda one: functional.poisson_nll_loss(one, torch.zeros(one.shape), reduction="none"),
    "pow": lambda one: one.pow(3),
    "exp": lambda one: one.exp(),
    "sqrt": lambda one: one.sqrt(),
    "rsqrt": lambda one: one.rsqrt(),
    "abs": lambda one: one.abs(),
    "erf": lambda one: one.erf(),
    "sin": lambda one: one.sin(),
    "clamp": lambda one: one.clamp(0.0, 1.0),
    "lerp": lambda one: one.lerp(2 * one, 0.5),
    "addcmul": lambda one: one.addcmul(one, one),
    "tril": lambda one: one.tril(),
    "einsum": lambda one: torch.einsum("ab...,cb...->ac...", one, one),
    "unbind": lambda one: one.unbind(1)[0],
    "chunk": lambda one: one.chunk(2, 1)[1],
    "expand": lambda one: one[:, :1].expand(one.shape),
    "repeat": lambda one: one.repeat([2] * one.dim()),
    "diff": lambda one: one.diff(dim=1),
    "var": lambda one: one.var(1),
    "median": lambda one: one.median(1).values,
    "max": lambda one: one.max(1).values,
    "maximum": lambda one: torch.maximum(one, 2 * one),
    "scatter": lambda one: one.scatter(1, torch.zeros(one.shape, dtype=torch.long), one),
    "index_add": lambda one: one.index_add(1, torch.zeros(2, dtype=torch.long), one[:, :2]),
    "dropout": lambda one: functional.dropout(one, 0.5),
    "mish twice": lambda one: functional.mish(functional.mish(one)),
    "reflection_pad": lambda one: functional.pad(one, (1, 1), "reflect") if one.dim() == 3 else one,
    "replication_pad": lambda one: functional.pad(one, (1, 1), "replicate") if one.dim() == 3 else one,
    "adaptive_max_pool": lambda one: functional.adaptive_max_pool2d(one, 2) if one.dim() == 4 else one,
    "conv_transpose": lambda one: (
        functional.conv_transpose2d(one, torch.ones(8, 3, 2, 2, requires_grad=True)) if one.dim() == 4 else one
    ),
    "depthwise": lambda one: (
        functional.conv2d(one, torch.ones(8, 1, 2, 2, requires_grad=True), groups=8) if one.dim() == 4 else one
    ),
    "local_response_norm": lambda one: functional.local_response_norm(one, 2) if one.dim() > 2 else one,
    "grid_sample": lambda one: (
        functional.grid_sample(one, torch.zeros(4, 3, 3, 2), align_corners=False) if one.dim() == 4 else one
    ),
    "bicubic": lambda one: functional.interpolate(one, scale_factor=2, mode="bicubic") if one.dim() == 4 else one,
    "bmm": lambda one: torch.bmm(one, one.mT) if one.dim() == 3 else one,
    "baddbmm": lambda one: torch.baddbmm(one @ one.mT, one, one.mT) if one.dim() == 3 else one,
    "addmm": lambda one: torch.addmm(torch.ones(3), one, torch.ones(one.shape[-1], 3)) if one.dim() == 2 else one,
    "cross_entropy": lambda one: functional.cross_entropy(one, torch.zeros(4, *one.shape[2:], dtype=torch.long)),
}


def strides(mode: Any, make: Callable[[], Tensor], op: Callable[[Tensor], Any], gradient_is_alike: bool) -> list[Any]:
    """The strides of an op's result and of its input's gradient."""
    with mode:
        given = make()
        leaf = torch.empty_strided(given.shape, given.stride()).fill_(0.5).requires_grad_()
        found = op(leaf)
        gradient = torch.empty_like(found) if gradient_is_alike else torch.empty(found.shape)
        (back,) = torch.autograd.grad(found, leaf, gradient)
    return [tuple(found.shape), found.stride(), back.stride()]


@pytest.mark.parametrize("name", OPS)
def test_strides_are_those_of_real_tensors(name: str) -> None:
    for layout, make in LAYOUTS.items():
        for alike in (True, False):
            fakes = strides(fake_mode(), make, OPS[name], alike)
            reals = strides(torch.enable_grad(), make, OPS[name], alike)
            assert fakes == reals, f"{layout}, gradient {'alike' if alike else 'contiguous'}"


class Channels(nn.Module):
    """Ops over channels of a sequence, whose results have strides of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, one: Tensor) -> Tensor:
        wide = functional.hardswish(self.norm(self.into(one).transpose(1, 2)))
        return self.out(functional.softplus(wide.roll(1, 2)).transpose(1, 2))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_model_of_them_is_bitwise(stages: int) -> None:
    """A view of what a batch norm made of a transposed tensor could not be made."""
    torch.manual_seed(0)
    model = nn.Sequential(Channels(), nn.LayerNorm(8), Channels())
    plain = copy.deepcopy(model)
    rows = torch.randn(8, 5, 8)
    with adaptra.compile(
        model, stages=stages, microbatches=2, example_inputs=(rows, rows), loss=nn.functional.smooth_l1_loss
    ) as pipe:
        assert pipe.session.compiled.difference is None
        loss = pipe.step(rows, rows)
        parts = [functional.smooth_l1_loss(plain(part), part) / 2 for part in rows.chunk(2)]
        for part in parts:
            part.backward()
        assert torch.equal(loss, parts[0].detach() + parts[1].detach())
        for name, one in pipe.named_parameters():
            found, expected = one.grad, plain.get_parameter(name).grad
            assert found is not None and expected is not None and torch.equal(found, expected), name
