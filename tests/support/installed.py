"""Transports of other packages, installed as an installer leaves them."""

from pathlib import Path


def install_transport(folder: str | Path, name: str, factory: str, package: str | None = None) -> None:
    """Leave a package in ``folder`` that adds a transport: found by whoever has the folder on its path.

    Args:
        folder: Where.
        name: Of the transport, and of the package unless that has a name of its own.
        factory: What makes it, as ``module:function``.
        package: The package's name.
    """
    package = package or name
    info = Path(folder) / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[adaptra.transports]\n{name} = {factory}\n")
