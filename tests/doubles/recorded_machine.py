"""A machine made of recordings: a root folder with files of the kernel, and programs that print what was recorded."""

from __future__ import annotations

import shlex


class RecordedMachine:
    """Its root, and the folder of its programs, which is the whole search path."""

    def __init__(self, folder):
        self.root, self.search_path = folder / "root", str(folder / "bin")
        for one in (self.root, folder / "bin"):
            one.mkdir()
        self._bin = folder / "bin"

    def file(self, name, text=""):
        """Write a file below the root."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def program(self, name, text, status=0, errors=""):
        """Make a program that prints a text, whatever its arguments, and ends with a status."""
        path = self._bin / name
        lines = f"printf '%s' {shlex.quote(text)}\nprintf '%s' {shlex.quote(errors)} >&2"
        path.write_text(f"#!/bin/sh\n{lines}\nexit {status}\n")
        path.chmod(0o755)

    def driver(self, version, *, devices=1):
        """Load a driver, with its devices."""
        self.file("sys/module/neuron/version", f"{version}\n")
        for number in range(devices):
            self.file(f"dev/neuron{number}").chmod(0o666)

    def packages(self, versions, status="installed"):
        """Install packages of the system, as dpkg-query prints them; it ends with 1 if one asked for is missing."""
        lines = [f"{status} {name} {version}\n" for name, version in versions.items()]
        self.program("dpkg-query", "".join(lines), status=1)

    def python_packages(self, versions, requires=(), description=""):
        """Install packages of Python, with what each (name, requirement) asks for; returns the folder for sys.path."""
        site = self.root.parent / "site"
        for name, version in versions.items():
            folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(parents=True)
            asked = "".join(
                f"Requires-Dist: {one}\n" for package, one in requires if package == name
            )
            text = (
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asked}\n{description}"
            )
            (folder / "METADATA").write_text(text)
        return str(site)
