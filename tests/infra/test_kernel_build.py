"""The build hook that compiles the scoring kernel: with a compiler, without one, and where it is required."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.divergence import KERNEL
from tests.conftest import IN_CI, REPOSITORY

_SPEC = importlib.util.spec_from_file_location("kernel_build", REPOSITORY / "infra" / "build" / "kernel.py")
assert _SPEC is not None
assert _SPEC.loader is not None
build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build)


class Said:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def run_hook(root: Path, version: str, source: str = "int nothing;\n") -> tuple[dict[str, Any], list[str]]:
    """What the hook makes of a kernel of this text: build data, and what it said."""
    folder = root / build.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.c").write_text(source)
    data: dict[str, Any] = {"artifacts": []}
    said = Said()
    hook = build.KernelHook(str(root), {}, None, None, str(root), "wheel", said)
    hook.initialize(version, data)
    return data, said.warnings


@pytest.mark.skipif(KERNEL == "numpy" and not IN_CI, reason="no C compiler")
def test_a_wheel_with_the_kernel_is_of_this_platform_and_of_every_python(tmp_path: Path) -> None:
    data, said = run_hook(tmp_path, "standard")
    assert said == []
    assert (tmp_path / build.BUILT).stat().st_size > 0
    assert [path.name for path in (tmp_path / build.FOLDER).iterdir() if path.suffix == ".part"] == []
    assert (data["artifacts"], data["pure_python"]) == ([build.BUILT], False)
    assert data["tag"].startswith("cp311-abi3-")
    # Installed from where it stands, nothing is packed.
    assert run_hook(tmp_path, "editable") == ({"artifacts": []}, [])


@pytest.mark.parametrize(
    ("compiler", "source"),
    [
        ("/nowhere/cc", "int nothing;\n"),
        (None, "no C\n"),
        ("'", "int nothing;\n"),
        ("true", "int nothing;\n"),
        ("sh -c 'printf \"Fehler: \\344\" >&2; exit 1'", "int nothing;\n"),
    ],
    ids=["absent", "no C", "no command", "writes nothing", "not in UTF-8"],
)
def test_without_it_the_build_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, source: str
) -> None:
    monkeypatch.delenv("KLAXON_KERNEL", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    (tmp_path / build.FOLDER).mkdir(parents=True)
    (tmp_path / build.BUILT).write_bytes(b"of an older version")
    data, said = run_hook(tmp_path, "standard", source)
    assert data == {"artifacts": []}
    assert len(said) == 1
    assert "was not compiled" in said[0]
    assert "numpy" in said[0]
    assert not (tmp_path / build.BUILT).exists()


def test_where_python_was_built_with_another_compiler_cc_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if shutil.which("cc") is None and not IN_CI:
        pytest.skip("no C compiler")
    monkeypatch.setattr(build.sysconfig, "get_config_var", {"CC": "/nowhere/clang -pthread"}.get)
    assert run_hook(tmp_path, "standard")[1] == []
    assert (tmp_path / build.BUILT).exists()


@pytest.mark.parametrize(("compiled", "tries"), [(False, True), (True, False)])
def test_make_setup_tries_again_where_there_is_no_kernel(tmp_path: Path, compiled: bool, tries: bool) -> None:
    """As the doctor's remedy says; and says what it takes, as pip shows nobody what the hook says."""
    for name in ("Makefile", "pyproject.toml", "infra/locks/dev.txt", "infra/build/kernel.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / build.FOLDER).mkdir(parents=True)
    if compiled:
        (tmp_path / build.BUILT).write_bytes(b"")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "called: $*"\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / ".ready").touch()
    said = make(tmp_path, "setup")
    assert ("called: -m pip install" in said) is tries
    assert ("no scoring kernel: it takes a C compiler" in said) is tries
    # Nobody without a compiler is made to wait for it at every other goal.
    assert "pip" not in make(tmp_path, "--dry-run", "check")


def make(folder: Path, *arguments: str) -> str:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, check=True).stdout


def test_where_it_is_required_the_build_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLAXON_KERNEL", "required")
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(build.NotCompiledError, match="no C compiler"):
        run_hook(tmp_path, "standard")


def test_the_image_requires_it() -> None:
    dockerfile = (REPOSITORY / "infra" / "docker" / "Dockerfile").read_text()
    assert "COPY infra/build infra/build\nRUN KLAXON_KERNEL=required python -m pip wheel" in dockerfile
    assert "build/kernel.py" in (REPOSITORY / "pyproject.toml").read_text()


def test_nothing_that_would_change_a_bit_is_among_the_flags() -> None:
    assert "-ffp-contract=off" in build.FLAGS
    for fast in (
        "-ffast-math",
        "-Ofast",
        "-funsafe-math-optimizations",
        "-fassociative-math",
        "-march=native",
    ):
        assert fast not in build.FLAGS
    assert sys.version_info >= (3, 11)  # what the kernel's limited interface needs
