"""A small LSTM: the chances that a slow worker stays slow, from its last samples of processor and network.

Two layers of 50 and a head of 256 and 128, over 25 samples and for 30 steps: the published sizes. The published one foretells
processor and bandwidth, and from them the time of a step. This one is trained for what is asked, which is easier: still slow or
not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

SAMPLES = 25
STEPS = 30
BATCH = 128


class SlowSoon(nn.Module):
    """The network. Input: batch × samples × figures. Output: the log odds that slowness lasts for 1, 2, … steps."""

    def __init__(self, figures: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(figures, 50, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(50, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, STEPS))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.head(self.lstm(samples)[0][:, -1])


def windows(figures: Sequence[Sequence[float]], mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Return the last samples at each step; before the first there is its copy."""
    rows = (torch.tensor(figures, dtype=torch.float32) - mean) / deviation
    rows = torch.cat([rows[:1].expand(SAMPLES - 1, -1), rows])
    return rows.unfold(0, SAMPLES, 1).transpose(1, 2)


def predicted(
    known: Sequence[Sequence[float]],
    known_slow: Sequence[bool],
    asked: Sequence[Sequence[float]],
    *,
    rounds: int,
    seed: int,
) -> list[list[float]]:
    """Train on one series, and return the chances that slowness lasts, at each step of another one."""
    torch.manual_seed(seed)
    rows = torch.tensor(known, dtype=torch.float32)
    mean, deviation = rows.mean(0), rows.std(0).clamp_min(1e-6)
    slow = torch.tensor(known_slow, dtype=torch.float32)
    inputs = windows(known, mean, deviation)[:-STEPS][slow[:-STEPS] > 0]
    targets = slow[1:].unfold(0, STEPS, 1).cumprod(1)[slow[:-STEPS] > 0]
    network = SlowSoon(rows.shape[1])
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(rounds):
        chosen = torch.randint(len(inputs), (BATCH,))
        loss = nn.functional.binary_cross_entropy_with_logits(network(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        parts = windows(asked, mean, deviation).split(1024)
        return torch.cat([network(part).sigmoid() for part in parts]).tolist()
