"""A placeholder for optimizer state that is not there, which takes next to no room in memory and in a checkpoint.

torch.distributed.checkpoint asks a state for its tensors in the same way before it saves and before it loads. It reads only
into tensors that are there then. So a parameter without state has placeholders of the form that its first step would give.
Saving writes None in their place. Loading gives one memory if the checkpoint has a tensor in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType


class AbsentState(Tensor):
    """Zeros in one place of memory for all elements. A copy that doesn't know torch's protocol for checkpoints stays zeros.

    Attributes:
        loaded: What a checkpoint has in its place, or None.
    """

    loaded: Tensor | None = None

    @staticmethod
    def like(tensor: Tensor) -> AbsentState:
        """Return a placeholder of the shape, dtype and device of a tensor."""
        one = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        return one.expand(tensor.shape).as_subclass(AbsentState)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor | None:
        if index.offset is None:  # to be written
            return None
        if self.loaded is None:
            self.loaded = torch.zeros(self.size(), dtype=self.dtype, device=self.device)
        return self.loaded

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # so that files have plain tensors

    def __deepcopy__(self, memo: object) -> AbsentState:
        made = AbsentState.like(self)
        made.loaded = None if self.loaded is None else self.loaded.clone()
        return made
