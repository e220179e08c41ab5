"""A module with its own parameters and buffers, made from the graph of a torch.compile backend.

Such a graph takes everything as an input: the user's tensors, the model's parameters and buffers, and sizes that vary. The
inputs are in the order of their first use. The source of each input, as recorded by dynamo, says which kind it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import TensorPropertySource

from adaptra.errors import CaptureError
from adaptra.graph.ops.autocast import enter_autocast_openly

_KEYS: Final = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")


def source_of(placeholder: fx.Node) -> Any:
    """Return the source of an input, as dynamo records it."""
    return placeholder._dynamo_source  # pyright: ignore[reportAttributeAccessIssue]


def is_state(placeholder: fx.Node, example: object) -> bool:
    """Return whether an input is one of a module's parameters or buffers."""
    return isinstance(example, nn.Parameter) or (isinstance(example, Tensor) and "._buffers[" in source_of(placeholder).name)


class GraphModel(nn.Module):
    """A module that runs such a graph on batches of any size.

    Its parameters are new tensors that share the memory of the model's. So the pipeline's gradients are separate from the
    model's, and an optimizer's changes of the model's parameters are visible here at once.

    Args:
        graph: The backend's graph.
        examples: The example inputs given with it.
        autocasts: Device and precision of each autocast under which the graph runs.

    Attributes:
        inputs: The positions of the user's tensors among the graph's inputs.
        state: The positions of parameters and buffers, by name.

    Raises:
        CaptureError: An input is neither a tensor nor the size of one. The text names it.
    """

    def __init__(
        self, graph: fx.GraphModule, examples: Sequence[Any], autocasts: Sequence[tuple[str, torch.dtype]] = ()
    ) -> None:
        super().__init__()
        self._autocasts = autocasts
        self.graph = graph
        enter_autocast_openly(graph)
        self.inputs: list[int] = []
        self.state: dict[str, int] = {}
        # Position of a size to (input, method, arguments), such as the size of one of the input's dimensions.
        self._facts: dict[int, tuple[int, str, tuple[int, ...]]] = {}
        placeholders = graph.graph.find_nodes(op="placeholder")
        at = {source_of(node).name: position for position, node in enumerate(placeholders)}
        for position, (node, example) in enumerate(zip(placeholders, examples, strict=True)):
            source = source_of(node)
            if is_state(node, example):
                self._hold(source.name, position, example)
            elif isinstance(example, Tensor):
                self.inputs.append(position)
            elif isinstance(source, TensorPropertySource) and source.base.name in at:
                asked = () if source.idx is None else (source.idx,)
                self._facts[position] = (at[source.base.name], source.prop.method_name(), asked)
            else:
                raise CaptureError(
                    f"{source.name}: a number that changes from call to call: expected numbers that stay as they are, which "
                    "become constants, or a tensor in its place"
                )

    def forward(self, *given: Tensor) -> Any:
        """Run the graph on the user's tensors, in the order of ``inputs``; returns a tuple, as the graph does."""
        tensors = dict(zip(self.inputs, given, strict=True))
        values: dict[int, Any] = dict(tensors)
        values |= {position: self._held(name) for name, position in self.state.items()}
        values |= {position: getattr(tensors[of], asked)(*args) for position, (of, asked, args) in self._facts.items()}
        with ExitStack() as entered:
            for device, dtype in self._autocasts:
                entered.enter_context(torch.autocast(device, dtype))
            return self.graph(*(values[position] for position in sorted(values)))

    def _hold(self, source: str, position: int, tensor: Tensor) -> None:
        root, *path = _KEYS.findall(source)
        name = ".".join(path if root == "self" else (root, *path))
        holder: nn.Module = self
        for part in name.split(".")[:-1]:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        last = name.rpartition(".")[2]
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(last, nn.Parameter(tensor.detach(), tensor.requires_grad))
        else:
            holder.register_buffer(last, tensor)
        self.state[name] = position

    def _held(self, name: str) -> Tensor:
        path, _, last = name.rpartition(".")
        return getattr(self.get_submodule(path), last)
