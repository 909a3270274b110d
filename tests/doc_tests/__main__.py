"""`python -m tests.doc_tests [--jobs N] [PAGE...]`: run the blocks of pages, of all unless some are named.

It prints each block that fails or is left out, and the share that was run; exit status 1 if a block failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.doc_tests.blocks import COMMANDS, ROOT, blocks, pages

PAGE_S = 300
UNSHARE = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def obstacle() -> str:
    """The reason for which no page can run on this machine; empty if pages can."""
    try:
        with TemporaryDirectory() as folder:
            mount = ["mount", "-t", "overlay", "overlay", "-o", "lowerdir=/usr:/etc", folder]
            ran = subprocess.run([*UNSHARE, *mount], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return ran.stderr.strip() if ran.returncode else ""


def run(page: str) -> list[dict[str, str]]:
    """The results of a page's blocks."""
    if not any(blocks(page, (ROOT / page).read_text(encoding="utf-8"))):
        return []
    command = [*UNSHARE, sys.executable, "-m", "tests.doc_tests.page", page]
    try:
        with TemporaryDirectory() as folder:  # the mount on it ends with the page
            ran = subprocess.run(
                [*command, folder],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=PAGE_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return [_failed(page, f"not done after {PAGE_S} s")]
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    if ran.returncode:
        results.append(_failed(page, ran.stderr))
    return results


def _failed(page: str, why: str) -> dict[str, str]:
    return {"place": page, "kind": "sh", "verdict": "failed", "why": why, "seconds": "-"}


def main(chosen: list[str], jobs: int) -> int:
    if why := obstacle():
        print(
            f"tests.doc_tests needs Linux, and root with the right to mount: {why}",
            file=sys.stderr,
        )
        return 1
    names = [os.path.relpath(Path(name).resolve(), ROOT) for name in chosen] or pages()
    data: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    with ThreadPoolExecutor(jobs) as executor:
        for results in executor.map(run, names):
            for result in results:
                has_commands = result["kind"] in COMMANDS
                (counts if has_commands else data)[result["verdict"]] += 1
                if has_commands and result["verdict"] in ("left out", "planned"):
                    reasons[result["why"]] += 1
                why = result["why"] or ""
                print(f"{result['verdict']:<8} {result['place']} ({result['seconds']} s): {why}")
    total = sum(counts.values())
    print(
        f"{counts['passed']} of {total} blocks of commands were run ({counts['passed'] / max(total, 1):.0%}), "
        f"{counts['failed']} failed, {counts['planned']} were checked for an instance with a device, "
        f"{counts['left out']} were left out; {data['passed']} of {sum(data.values())} blocks of data are valid.",
    )
    for why, number in reasons.most_common():
        print(f"  {number:3} need {why}")
    return 1 if counts["failed"] or data["failed"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.doc_tests", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("--jobs", type=int, default=3, help="pages at a time (default %(default)s)")
    arguments = parser.parse_args()
    sys.exit(main(arguments.pages, arguments.jobs))
