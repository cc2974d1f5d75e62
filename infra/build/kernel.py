"""Hatchling's build hook: compiles the scoring kernel beside the Python that uses it.

Where no C compiler is, the package is as good without it, and slower: numpy scores then. With
KLAXON_KERNEL=required a build without it fails, as the image's does.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "pipeline/core/divergence"
BUILT = f"{FOLDER}/kernel.abi3.so"
FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra",
    # The same bits on every machine: nothing fused, nothing reordered. Left out are errno and traps only.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip


class NotCompiledError(Exception):
    """There is no kernel; the text says why."""


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before a wheel is packed, and before an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel that holds the kernel is of this platform, and of every Python from 3.11 on."""
        built = Path(self.root) / BUILT
        try:
            compile_kernel(Path(self.root) / FOLDER / "kernel.c", built)
        except NotCompiledError as error:
            # One of an older version would be worse than none.
            built.unlink(missing_ok=True)
            if os.environ.get("KLAXON_KERNEL") == "required":
                raise
            self.app.display_warning(
                f"{error}. Klaxon works without it: numpy scores pairs, at a third of the speed."
            )
            return
        if version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform}"
            build_data["artifacts"].append(BUILT)


def compile_kernel(source: Path, to: Path, extra: tuple[str, ...] = ()) -> None:
    """Raises NotCompiledError."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NotCompiledError("the scoring kernel is for CPython with its lock")
    compiler = _compiler()
    apple = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    headers = sysconfig.get_paths()["include"]
    part = to.with_suffix(".part")
    part.unlink(missing_ok=True)
    command = [*compiler, *FLAGS, *apple, *extra, f"-I{headers}", "-o", str(part), str(source), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise NotCompiledError(f"the scoring kernel was not compiled: no C compiler ({error})") from error
    if done.returncode or not part.exists():
        named = shlex.join(compiler)
        raise NotCompiledError(f"the scoring kernel was not compiled by {named}:\n{done.stderr.strip()}")
    part.replace(to)  # a process that has the old one mapped keeps it


def _compiler() -> list[str]:
    """CC; else what Python was built with, where that is here; else cc. Raises NotCompiledError."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise NotCompiledError(f"the scoring kernel was not compiled: CC is no command ({error})") from error
    built_with = shlex.split(sysconfig.get_config_var("CC") or "cc")
    return named or (built_with if shutil.which(built_with[0]) else ["cc"])
