"""Where the Triton is that compiles for a V100, and the CUDA tools that come with it.

Triton 3.6 is the newest release of the V100 stack, and the last one whose ``nvdisasm`` reads code for sm_70.
It is unpacked into a folder of its own, beside whatever Triton is installed: this process never imports it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from page4.kernels.errors import InputError

VERSION = "3.6.0"
FOLDER_VARIABLE = "PAGE4_SM70"
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / ".sm70"  # of a checkout


@dataclass(frozen=True)
class Toolchain:
    """A Triton and its tools.

    Attributes:
        packages: the folder to import ``triton`` from.
        version: of Triton.
    """

    packages: Path
    version: str

    def tool(self, name: str) -> Path:
        """The path of ``nvdisasm``, ``cuobjdump`` or ``ptxas``."""
        return self.packages / "triton" / "backends" / "nvidia" / "bin" / name

    def disassemble(self, cubin: bytes) -> str:
        """The text of a binary's code with its 128-bit encodings, as ``nvdisasm -c -hex`` prints it.

        Raises:
            subprocess.CalledProcessError: the tool refuses it: that of Triton 3.7 knows no sm_70.
        """
        return self._run("nvdisasm", ["-c", "-hex"], cubin)

    def resources(self, cubin: bytes) -> tuple[int, int]:
        """Registers and bytes of local memory per thread."""
        text = self._run("cuobjdump", ["--dump-resource-usage"], cubin)
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        if not found:
            raise ValueError(f"cuobjdump reports no registers: {text!r}")
        return int(found[1]), int(found[2])

    def _run(self, name: str, options: Sequence[str], cubin: bytes) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [str(self.tool(name)), *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def side_install() -> Toolchain:
    """The unpacked Triton for sm_70, in the folder that ``PAGE4_SM70`` names or in ``.sm70`` of the checkout.

    Raises:
        InputError: it is not there, or is for another Python; the message says how to get it.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    wheel = folder / f"triton-{VERSION}.dist-info" / "WHEEL"
    if not wheel.is_file():
        raise InputError(
            f"Triton {VERSION}, which compiles for sm_70, is not in {folder}: run `make sm70`, or "
            f"`pip install --no-deps --target FOLDER triton=={VERSION}` and set {FOLDER_VARIABLE}=FOLDER"
        )
    tag = "cp{}{}".format(*sys.version_info)
    if f"Tag: {tag}-" not in wheel.read_text(encoding="utf-8"):
        raise InputError(
            f"Triton {VERSION} in {folder} is not for this Python ({tag}): remove the folder first"
        )
    return Toolchain(folder.resolve(), VERSION)


def installed() -> Toolchain:
    """The Triton of this environment."""
    import triton

    return Toolchain(Path(triton.__file__).resolve().parents[1], triton.__version__)
