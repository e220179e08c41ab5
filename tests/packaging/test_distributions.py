"""What is handed out: the source distribution and the wheel, and what the package index shows of them."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("scikit_build_core", reason="the build's parts are not installed here: pip install 'adaptra[dev]'")

ALLOWED = re.compile(
    r"PKG-INFO|pyproject\.toml|CMakeLists\.txt|README\.md|CHANGELOG\.md|SECURITY\.md|LICENSE"
    r"|csrc/([a-z0-9_]+/)*[a-z0-9_]+\.(cc|h)"
    r"|src/adaptra/([a-z0-9_]+/)*(\w+\.py|_C\.pyi|py\.typed)"
)


def build(kind: str, folder: Path) -> Path:
    """The distribution that the build's back end makes, without a network."""
    code = f"import scikit_build_core.build as back_end; back_end.build_{kind}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tmp_path_factory.mktemp("sdist"))


def test_the_source_distribution_is_what_a_wheel_is_made_of(source: Path) -> None:
    with tarfile.open(source) as archive:
        members = archive.getmembers()
    assert not [one.name for one in members if not one.isfile()], "no links: they lead nowhere outside of a checkout"
    names = {one.name.partition("/")[2] for one in members}
    assert not [name for name in names if not ALLOWED.fullmatch(name)]
    csrc = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert csrc <= names
    for folder, inside in (("adaptra_compile", ""), ("passes", "passes/"), ("runtime", "runtime/")):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"src/adaptra/{inside}{path.relative_to(ROOT / folder)}" in names


def test_every_link_that_the_index_shows_is_absolute(source: Path) -> None:
    with tarfile.open(source) as archive:
        (name,) = [name for name in archive.getnames() if name.endswith("/PKG-INFO")]
        file = archive.extractfile(name)
        assert file is not None
        metadata = message_from_bytes(file.read())
    text = metadata.get_payload()
    assert isinstance(text, str)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) == len(re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text()))
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://")]
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert sum(link.startswith(urls["Homepage"]) for link in links) > 10
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(metadata.get_all("Classifier", []))


def test_no_source_needs_the_header_of_libibverbs() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert sources
    assert not [path for path in sources if "<infiniband/" in path.read_text()]


@pytest.mark.processes
def test_a_wheel_runs_where_nothing_else_is_installed(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    wheel = build("wheel", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"adaptra/py.typed", "adaptra/_C.pyi", "adaptra/runtime/__init__.py", "adaptra/passes/__init__.py"} <= set(names)
    assert not [name for name in names if not name.startswith(("adaptra/", "adaptra-"))]
    assert len([name for name in names if name.endswith(".so")]) == 1
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    run(python, "-c", "import adaptra, sys; assert 'torch' not in sys.modules; adaptra.Program; import adaptra._C")
    adaptra = python.with_name("adaptra")
    assert "doctor" in run(adaptra, "--help")
    shown = run(adaptra, "doctor")
    assert re.search(r"^extension +built$", shown, re.MULTILINE)
    assert re.search(r"^torch +missing: pip install torch$", shown, re.MULTILINE)
    # RDMA is in it, whatever the machine that it was built on has: what is missing is the library or a device.
    reason = run(python, "-c", "from adaptra import _C; print(_C.find_verbs_ports()[1])").strip()
    assert not reason or reason.startswith(("libibverbs: ", "this machine has no RDMA device", "the list of RDMA devices"))
