"""Sites that train on cuda and exchange from memory of the host, to the bits of the same sites on the CPU."""

from __future__ import annotations

from processes import run_processes


def train(_rank: int, device: str) -> list[bytes]:
    """The bits of this rank's parameters after each step."""
    import torch
    from torch import nn

    import adaptra

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    inputs, targets = torch.randn(8, 8).to(device), torch.randn(8, 4).to(device)
    options = adaptra.Options(synchrony=adaptra.Local(2))
    bits: list[bytes] = []
    with adaptra.compile(
        model, stages=1, microbatches=2, example_inputs=(inputs, targets), loss=nn.functional.mse_loss, options=options
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(5):
            pipe.step(inputs * (1 + pipe.replica + step), targets)
            optimizer.step()
            optimizer.zero_grad()
            bits.append(b"".join(one.detach().cpu().numpy().tobytes() for one in pipe.parameters()))
        assert {one.device.type for one in pipe.parameters()} == {device}
    return bits


def test_sites_exchange_what_devices_have_learnt() -> None:
    assert run_processes(train, 2, "cuda") == run_processes(train, 2, "cpu")
