"""The ops of eager torch first, its bits second, also with the kernels of lesser processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import SUPPORT

MODELS = ["GPT-2", "Llama", "T5", "U-Net"]
"""Plain attention, grouped heads, two inputs, and convolutions; all others run by ``make unit`` under the same variable."""

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from architectures import ARCHITECTURES
from training import compiled, differences, train, train_alone
found = {}
for name in sys.argv[2:]:
    example = ARCHITECTURES[name]
    batches = [example.rows(6, seed) for seed in range(2)]
    with compiled(example, batches[0], stages=2, microbatches=3) as pipe:
        other = pipe._session.compiled.difference
        found[name] = [str(other)] * (other is not None) + differences(train(pipe, batches), train_alone(example, batches, 3))
print(json.dumps([torch.backends.cpu.get_cpu_capability(), found]))
"""


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_it_is_eager_torch_with_these_kernels(capability: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(SUPPORT), *MODELS]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
    )
    assert done.returncode == 0, done.stderr
    used, found = json.loads(done.stdout.splitlines()[-1])
    if used != capability.upper():
        pytest.skip(f"this processor has no {capability}: torch uses {used}")
    assert found == {name: [] for name in MODELS}
