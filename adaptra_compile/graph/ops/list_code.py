"""Code of graphs that take their values in one list, so that nobody else keeps them alive."""

from __future__ import annotations

from typing import Any

from torch.fx.graph import CodeGen


class ListCodeGen(CodeGen):
    """Generates code that takes all arguments in one list and empties it, so that each is freed after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """Return the first lines of the function; see :class:`torch.fx.graph.CodeGen`."""
        names = [name.split(":")[0].strip() for name in free_vars if name.split(":")[0].strip() != "self"]
        unpack = f"    {', '.join(names)}, = values\n" if names else ""
        return f"def {self._func_name}(self, values){maybe_return_annotation}:\n{unpack}    values.clear()"
