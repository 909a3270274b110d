"""Builds the sampler's kernel, `sampling.c`: as hatchling's hook with every wheel and editable installation.

`python -m tools.build_native` builds it in a checkout that is not installed (hatchling must be). It needs Linux and a C
compiler: `$CC`, or `cc`. Without one a wheel is built without the kernel, for every platform, and so it is with
`DJL_NEURONX_NATIVE=0`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "djl_python_neuronx/engine/sampling.c"
LIBRARY = "djl_python_neuronx/engine/_sampling.so"
EXACT = ("-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Without fused multiplication and addition every compiler's results are the same; the other flags change none."""
FAST = ("-O3", "-fvisibility=hidden")
SHARED = ("-shared", "-fPIC", "-pthread")


def compile_kernel(folder: Path, library: Path, *flags: str) -> str | None:
    """Compile the kernel of a checkout into the file `library`. Returns the reason if that fails."""
    switched_off = os.environ.get("DJL_NEURONX_NATIVE", "").lower() in {"0", "false", "no", "off"}
    if sys.platform != "linux" or switched_off:
        return "not on Linux, or switched off by DJL_NEURONX_NATIVE=0"
    made = library.with_suffix(f".{os.getpid()}.tmp")
    version = f"-DVERSION={zlib.crc32((folder / SOURCE).read_bytes())}u"
    command = [*shlex.split(os.environ.get("CC", "cc")), *EXACT, *SHARED, version, *flags]
    try:
        ran = subprocess.run(  # noqa: S603
            [*command, "-o", str(made), str(folder / SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return str(error)
    if ran.returncode:
        made.unlink(missing_ok=True)
        return ran.stderr.strip() or f"{command[0]} ended with status {ran.returncode}"
    # A process that has loaded the old one keeps it.
    made.replace(library)
    return None


class KernelHook(BuildHookInterface[Any]):
    """Hatchling's hook of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the kernel into the package, and name the platform in the wheel's tag."""
        library = Path(self.root) / LIBRARY
        if reason := compile_kernel(Path(self.root), library, *FAST):
            library.unlink(missing_ok=True)
            self.app.display_warning(f"without the sampler's kernel: {reason}")
        elif version == "standard":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(LIBRARY)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    checkout = Path(__file__).parents[1]
    sys.exit(compile_kernel(checkout, checkout / LIBRARY, *FAST))
