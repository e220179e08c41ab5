"""Complex numbers cross cuts with their bits: rotary positions, complex layers, conjugates and transposes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from models import Batch, Example, generator, square_loss
from torch import Tensor, nn
from training import compiled, differences, train, train_alone

from adaptra import Options


@dataclass(frozen=True)
class Kept(Example):
    """An example whose complex parameters stay complex."""

    def make(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()


def rows(count: int, seed: int) -> Batch:
    drawn = torch.randn(2, count, 6, 8, generator=generator(seed))
    return (drawn[0],), {}, drawn[1]


class Rotary(nn.Module):
    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        angles = torch.outer(torch.arange(6.0), torch.arange(1.0, 5.0))
        self.register_buffer("turn", torch.polar(torch.ones(6, 4), angles))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            turned = torch.view_as_complex(layer(x).unflatten(-1, (4, 2))) * self.turn
            x = torch.tanh(torch.view_as_real(turned).flatten(-2))
        return x


class Layers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        width = 6 if kind == "transposed" else 8
        self.layers = nn.ModuleList(
            nn.Linear(width if i % 2 else 8, width if i % 2 else 8, dtype=torch.cfloat) for i in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.flip(-1))
        for layer in self.layers:
            z = layer(z)
            match self.kind:
                case "conjugate":
                    z = z.conj()
                case "transposed":
                    z = z.mH
                case _:
                    z = z * torch.sigmoid(z.abs())
        return z.mT.real if self.kind == "transposed" else z.real


class Fourier(nn.Module):
    """Its real transforms hand real views of complex gradients, with gaps, back over cuts before them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.fft.irfft(torch.fft.rfft(self.before(x)) * self.weight, n=8))


MODELS = {"rotary": Rotary, "fourier": lambda: nn.Sequential(*(Fourier() for _ in range(3)))} | {
    kind: (lambda kind=kind: Layers(kind)) for kind in ("gated", "conjugate", "transposed")
}


class Parts(nn.Module):
    """Real views of complex tensors whose gradients are summed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            z = torch.view_as_complex(layer(x).unflatten(-1, (4, 2)))
            z = z * z.conj().exp()
            x = torch.cat([z.real, z.imag], -1)
        return x


def test_real_views_of_complex_tensors_are_no_difference_from_eager() -> None:
    example = Kept("parts", Parts, rows, square_loss)
    options = Options(captured="error")
    with compiled(example, example.rows(6, 0), stages=2, microbatches=3, options=options) as pipe:
        train(pipe, [example.rows(6, 0)])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_complex_numbers_cross_cuts_with_their_bits(name: str) -> None:
    example = Kept(name, MODELS[name], rows, square_loss)
    batches = [example.rows(6, seed) for seed in range(2)]
    expected = train_alone(example, batches, 3)
    for stages in (1, 4, 5):
        with compiled(example, batches[0], stages=stages, microbatches=3) as pipe:
            assert differences(train(pipe, batches), expected) == [], stages
