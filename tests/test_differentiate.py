from __future__ import annotations

import pytest
import torch
from chained import compile_example, train_eagerly, train_in_stages
from models import EXAMPLES

ROWS, MICROBATCHES = 3, 3


@pytest.mark.parametrize(
    ("dtype", "stages"),
    [(torch.float32, 1), (torch.float32, 2), (torch.float32, 4), (torch.bfloat16, 1), (torch.bfloat16, 4)],
    ids=["fp32-1", "fp32-2", "fp32-4", "bf16-1", "bf16-4"],
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_stages_compute_bitwise_what_eager_torch_computes(name: str, dtype: torch.dtype, stages: int) -> None:
    example = EXAMPLES[name]
    batches = [example.rows(ROWS, seed, dtype) for seed in range(MICROBATCHES)]
    model = example.make(dtype)
    # Bitwise needs the uses of a tied parameter that are not its last ones on stages of their own; see TiedParameter.users.
    split = ["inner.1"] if (name, stages) == ("tied_twice", 2) else None
    compiled = compile_example(example, model, batches[0], stages, split=split)
    assert len(compiled.train) == stages
    in_stages = train_in_stages(compiled, model, batches)
    assert in_stages.differences(train_eagerly(example, model, batches)) == []
