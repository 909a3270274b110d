"""A download that may be cut off at any byte, and goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 16 * 2**20
"""What one request asks for, and what a killed download loses per thread at most."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a remote folder, as its listing describes it."""

    name: str
    """Relative to the folder, with `/`."""
    size: int
    etag: str
    """Changes whenever the content does."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` (exclusive) of a file: what one request fetches."""

    file: RemoteFile
    start: int
    end: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """True if the file is just this piece."""
        return self.size == self.file.size


def boot_id() -> str:
    """Names the time since this machine's kernel started; empty where it is not told.

    What a killed process wrote is safe in the page cache; what a crashed machine wrote may be zeros in a file of the
    right size. A different id says that the second is possible.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class PartialFolder:
    """Files being filled piece by piece, and the journal of pieces that are whole. One process at a time.

    A piece enters the journal after its last byte is written, under the ETag that it was fetched with; whatever
    the journal does not vouch for is fetched again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = path / "files"
        self._journal = path / "journal"
        self._lock = threading.Lock()
        self._done: set[Piece] = set()

    def missing_bytes(
        self, wanted: Sequence[RemoteFile], present: Mapping[RemoteFile, Path]
    ) -> int:
        """How much `prepare` with these would find missing; changes nothing."""
        done = self._read_journal(wanted)
        return sum(file.size for file in wanted if file not in present) - sum(
            piece.size for piece in done if piece.file not in present
        )

    def prepare(
        self, wanted: Sequence[RemoteFile], present: Mapping[RemoteFile, Path]
    ) -> list[Piece]:
        """The pieces that are missing; files and journal are made ready for them, what is not wanted goes.

        `present` tells where some files already lie whole: they are linked, not copied.
        """
        done = self._read_journal(wanted)
        if not done:
            shutil.rmtree(self.path, ignore_errors=True)
        self.files.mkdir(parents=True, exist_ok=True)
        self._remove_others({file.name for file in wanted})
        linked = {file for file in wanted if file in present and self._link(file, present[file])}
        fresh = {file for file in wanted if file not in linked and self._allot(file)}
        done = {piece for piece in done if piece.file not in fresh}
        done |= {piece for file in linked for piece in _pieces(file)}
        self._write_journal(done)
        self._done = done
        return self.missing(wanted)

    def missing(self, wanted: Sequence[RemoteFile]) -> list[Piece]:
        """The pieces that nobody vouches for, since `prepare`."""
        return [piece for file in wanted for piece in _pieces(file) if piece not in self._done]

    @contextmanager
    def open(self, file: RemoteFile) -> Iterator[int]:
        """A descriptor to write pieces of this file through, at their offsets."""
        descriptor = os.open(self.files / file.name, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def record(self, piece: Piece) -> None:
        """Vouch for a piece whose bytes are all written. Any thread."""
        with self._lock, self._journal.open("a", encoding="utf-8") as journal:
            journal.write(_line(piece))
            self._done.add(piece)

    def _read_journal(self, wanted: Sequence[RemoteFile]) -> set[Piece]:
        try:
            header, *lines = self._journal.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError):
            return set()
        boot = boot_id()
        if not boot or header != boot:
            return set()
        vouched = set(lines[:-1])  # what follows the last newline was cut off
        return {
            piece
            for file in wanted
            if file_size(self.files / file.name) == file.size
            for piece in _pieces(file)
            if _line(piece).rstrip("\n") in vouched
        }

    def _write_journal(self, done: Collection[Piece]) -> None:
        """In one step, and before any byte changes: else pieces of an ETag that came, went and came would count."""
        temporary = self._journal.with_name("journal.new")
        temporary.write_text(f"{boot_id()}\n" + "".join(map(_line, done)), encoding="utf-8")
        temporary.replace(self._journal)

    def _remove_others(self, names: Collection[str]) -> None:
        for path in sorted(self.files.rglob("*"), reverse=True):  # what lies deeper comes first
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(self.files).as_posix() not in names:
                path.unlink()

    def _link(self, file: RemoteFile, source: Path) -> bool:
        target = self.files / file.name
        if file_size(source) != file.size:
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:  # a file system without links, or one that is full
            return False
        return True

    def _allot(self, file: RemoteFile) -> bool:
        """Make the file in its full size, empty; False if it is there already."""
        path = self.files / file.name
        # A file with a second name belongs to a published version too: never written to.
        if file_size(path) == file.size and path.stat().st_nlink == 1:
            return False
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as created:
            created.truncate(file.size)
        return True


def _pieces(file: RemoteFile) -> Iterator[Piece]:
    for start in range(0, file.size, PIECE_BYTES):
        yield Piece(file, start, min(start + PIECE_BYTES, file.size))


def _line(piece: Piece) -> str:
    return json.dumps([piece.file.name, piece.file.etag, piece.start, piece.end]) + "\n"


def file_size(path: Path) -> int | None:
    """In bytes, a link not followed; None if there is nothing."""
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return None
