"""Ways to hide code in a file of `torch.save`. Loaded without limits each runs it; the check refuses each.

The check's reference is torch's weights-only loader: what that one refuses is refused, what `torch.save` writes is not.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import tarfile
import tracemalloc
import zipfile
from collections import OrderedDict
from contextlib import suppress

import pytest

from djl_python_neuronx.artifacts import tensor_files
from djl_python_neuronx.artifacts.folder import Folder
from djl_python_neuronx.artifacts.tensor_files import check_pickles
from djl_python_neuronx.errors import ArtifactError

MARK = "pickle-was-run"
CODE = f"open({MARK!r}, 'w').close()"
MAGIC = 0x1950A86A20F9469CFC6C
HARMLESS = pickle.dumps({"weight": 1}, protocol=2)


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def called(module, name, *arguments, start=b"\x80\x02"):
    """The pickle of a call with texts, by the instructions GLOBAL and REDUCE."""
    return start + b"c" + f"{module}\n{name}\n".encode() + called_with(*arguments)


def called_with(*arguments):
    return b"(" + b"".join(map(text, arguments)) + b"tR."


EVIL = called("builtins", "eval", CODE)


def archive(data=EVIL, name="archive/data.pkl", *, method=zipfile.ZIP_STORED, more=()):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        file.writestr(name, data)
        for other, content in {**dict(more), "archive/version": b"3\n"}.items():
            file.writestr(other, content)
    return stream.getvalue()


def legacy(*pickles):
    """Magic number, protocol, system, object, keys: five pickles, those given in their places from the end."""
    whole = [MAGIC, 1001, {"little_endian": True}, {}, []]
    parts = [pickle.dumps(one, protocol=2) for one in whole]
    return b"".join([*parts[: 5 - len(pickles)], *pickles])


def twice():
    """Two central entries of one name; torch and `zipfile` take the other one each."""
    return archive(more=[("archive/atad.pkl", HARMLESS)]).replace(b"atad", b"data")


def other_local_name():
    """The entry of the directory says data.pkl, the header in front of the data something else."""
    return archive().replace(b"archive/data.pkl", b"archive/data.xyz", 1)


def other_unicode_name():
    """A field that `zipfile` takes for the name from Python 3.13 on."""
    name = b"archive/data.xyz"
    field = struct.pack("<HHBL", 0x7075, 5 + len(name), 1, zipfile.crc32(b"archive/data.pkl"))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        info = zipfile.ZipInfo("archive/data.pkl")
        info.extra = field + name
        file.writestr(info, EVIL)
        file.writestr("archive/version", b"3\n")
    return stream.getvalue()


def with_crc(content, like):
    """A text of the length and the CRC of `like` that starts with `content`: every checksum is right."""
    rest = len(like) - len(content)
    state = zipfile.crc32(content.ljust(len(like) - 4, b"\0"))
    zero = zipfile.crc32(bytes(4), state)
    rows = [
        (zipfile.crc32((1 << i).to_bytes(4, "little"), state) ^ zero, 1 << i) for i in range(32)
    ]
    left, tail = zero ^ zipfile.crc32(like), 0
    for bit in range(
        32
    ):  # Gauss: each row is the change of the CRC by some bits of the last four bytes
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [
            (row[0] ^ pivot[0], row[1] ^ pivot[1]) if row[0] >> bit & 1 else row
            for row in rows
            if row is not pivot
        ]
        if left >> bit & 1:
            left, tail = left ^ pivot[0], tail ^ pivot[1]
    return content.ljust(len(content) + rest - 4, b"\0") + tail.to_bytes(4, "little")


def two_places(path):
    """Two fields of 64 bits for one member: `zipfile` takes the place in the last one, torch that in the first."""
    harmless = HARMLESS.ljust(len(EVIL) + 8, b"\0")
    name = b"archive/data.pkl"
    far = 2**32 - 1
    sizes = (zipfile.crc32(harmless), len(harmless), len(harmless), len(name))
    local = struct.pack("<4sH8xLLLHH", b"PK\3\4", 20, *sizes, 0) + name
    extra = struct.pack("<HHQHHQ", 1, 8, far, 1, 8, 0)
    entry = (
        struct.pack("<4sHH8xLLLHH10xL", b"PK\1\2", 20, 20, *sizes, len(extra), far) + name + extra
    )
    with path.open("wb") as file:
        file.write(local + harmless)
        place = file.tell()
        raw = b"3\n"
        sizes = (zipfile.crc32(raw), 2, 2, 15)
        head = struct.pack("<4sH8xLLLHH", b"PK\3\4", 20, *sizes, 0)
        file.write(head + b"archive/version" + raw)
        entry += struct.pack("<4sHH8xLLLHH10xL", b"PK\1\2", 20, 20, *sizes, 0, place)
        entry += b"archive/version"
        file.seek(far)
        file.write(local + with_crc(EVIL, harmless))
        start = file.tell()
        end = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(entry), start)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + len(entry), 1)
        last = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 2, 2, far, far, 0)
        file.write(entry + end + locator + last)


def fewer_entries():
    """The end record counts two members, the directory holds three: a harmless one of that name last."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in (("data.pkl", EVIL), ("version", b"3\n"), ("DATA.PKL", HARMLESS)):
            file.writestr(f"archive/{name}", content)
    raw = stream.getvalue()
    end = raw.rindex(b"PK\5\6")
    return raw[: end + 8] + struct.pack("<HH", 2, 2) + raw[end + 12 :]


def tarred():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(EVIL)
            file.addfile(member, io.BytesIO(EVIL))
    return stream.getvalue()


def through_getattr():
    """getattr(__import__('os'), 'system') in three calls."""
    got = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(" + text("os") + b"tR" + text("system")
    return b"\x80\x02" + got + b"tR" + called_with(f"touch {MARK}")


def by_type():
    """torch's own function calls the one in its first argument."""
    return (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\neval\nctorch\nTensor\n("
        + text(CODE)
        + b"t}tR."
    )


def partial():
    return b"\x80\x02cfunctools\npartial\n(cbuiltins\neval\n" + text(CODE) + b"tR(tR."


def new_object(instruction):
    """tuple.__new__(tuple, map.__new__(map, eval, [CODE])): nothing is called but classes."""
    lazy = b"cbuiltins\nmap\n(cbuiltins\neval\n](" + text(CODE) + b"et" + instruction
    return b"\x80\x04cbuiltins\ntuple\n(" + lazy + b"t" + instruction + b"."


def built():
    """The state of an object replaces its __setstate__, which the next state calls."""
    state = b"}" + text("__setstate__") + b"cbuiltins\neval\ns"
    return b"\x80\x02ctypes\nSimpleNamespace\n)R" + state + b"b" + text(CODE) + b"b."


EVASIONS = {
    "a call": archive(),
    "a name in capitals": archive(name="archive/DATA.PKL"),
    "a name in other capitals": archive(name="archive/Data.Pkl"),
    "two members of one name": twice,
    "two members but for capitals": archive(more=[("archive/DATA.PKL", HARMLESS)]),
    "another name in front of the data": other_local_name,
    "another name in Unicode": other_unicode_name,
    "two places of one member": two_places,
    "fewer entries than there are": fewer_entries,
    "a compressed pickle": archive(method=zipfile.ZIP_DEFLATED),
    "an archive before an archive": archive() + archive(HARMLESS.ljust(len(EVIL))),
    "pickles before an archive": legacy(EVIL) + archive(HARMLESS),
    "data behind the archive": archive() + b"behind",
    "an archive with a comment": archive()[:-2] + b"\5\0hello",
    "a tar file": tarred,
    "a legacy file": legacy(EVIL, pickle.dumps([], protocol=2)),
    "the first of the pickles": legacy(EVIL, HARMLESS, HARMLESS, HARMLESS, HARMLESS),
    "the last of the pickles": legacy(EVIL),
    "text of protocol 0": f"cbuiltins\neval\n(V{CODE}\ntR.".encode(),
    "text of protocol 0, later": legacy(f"cbuiltins\neval\n(V{CODE}\ntR.".encode()),
    "names of Python 2": archive(called("__builtin__", "eval", CODE)),
    "a dotted name": archive(
        called("torch", "serialization.os.system", f"touch {MARK}", start=b"\x80\x04")
    ),
    "names on the stack": archive(
        b"\x80\x04" + text("builtins") + text("eval") + b"\x93" + called_with(CODE)
    ),
    "names from the memo": archive(
        b"\x80\x04" + text("eval") + b"\x940" + text("builtins") + b"h\0\x93" + called_with(CODE)
    ),
    "escaped names": archive(
        b"\x80\x04" + b"S'\\x62uiltins'\nS'\\x65val'\n\x93" + called_with(CODE)
    ),
    "framed": archive(b"\x80\x04\x95" + struct.pack("<Q", len(EVIL) - 2) + EVIL[2:]),
    "INST": archive(b"\x80\x02(" + text(CODE) + b"ibuiltins\neval\n."),
    "OBJ": archive(b"\x80\x02(cbuiltins\neval\n" + text(CODE) + b"o."),
    "NEWOBJ": archive(new_object(b"\x81")),
    "NEWOBJ_EX": archive(new_object(b"}\x92")),
    "BUILD": archive(built()),
    "a chain of getattr": archive(through_getattr()),
    "functools.partial": archive(partial()),
    "rebuilding by a type": archive(by_type()),
    "a pickle in a pickle": archive(
        b"\x80\x03ctorch.storage\n_load_from_bytes\n(C"
        + bytes([len(legacy(EVIL))])
        + legacy(EVIL)
        + b"tR."
    ),
    "numpy": archive(called("numpy.testing._private.utils", "runstring", CODE)[:-3] + b"}tR."),
    "importing": archive(called("runpy", "run_path", "code.py")),
    "no end": archive(EVIL[:-1]),
    "an unknown instruction behind it": archive(EVIL[:-1] + b"\xff"),
    "cut behind it": archive(EVIL[:-1] + b"X\xff\xff\xff\x7f"),
}


def write(tmp_path, content):
    (tmp_path / "code.py").write_text(CODE)
    path = tmp_path / "pytorch_model.bin"
    if content is two_places:
        two_places(path)
    else:
        path.write_bytes(content() if callable(content) else content)
    return path


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", EVASIONS)
def test_it_is_refused_and_would_run(tmp_path, name):
    path = write(tmp_path, EVASIONS[name])
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin"):
        check_pickles(Folder.open(tmp_path), [path.name])
    assert not (tmp_path / MARK).exists()
    torch = pytest.importorskip("torch")
    with suppress(Exception):
        torch.load(path, weights_only=False)
    assert (tmp_path / MARK).exists()


ODD = {
    "TorchScript": archive(HARMLESS, more=[("archive/constants.pkl", HARMLESS)]),
    "TorchScript in capitals": archive(HARMLESS, more=[("archive/Constants.PKL", HARMLESS)]),
    "a registered class": archive(b"\x80\x02\x82\x01(tR."),
    "a registered class, long": archive(b"\x80\x02\x84\x01\0\0\0(tR."),
    "another member of that kind": archive(HARMLESS, more=[("archive/code/other.pkl", EVIL)]),
    "no pickle at all": archive(HARMLESS, name="archive/data.txt"),
    "a second pickle": archive(HARMLESS, more=[("archive/b.pkl", HARMLESS)]),
    "an encrypted member": archive(HARMLESS).replace(
        b"PK\1\2\x14\3\x14\0\0", b"PK\1\2\x14\3\x14\0\1"
    ),
    "a wrong checksum": archive(HARMLESS).replace(b"weight", b"height"),
    "nothing but a start": b"PK\3\4",
    "a 64-bit end of nothing": b"PK\3\4"
    + b"PK\6\6"
    + bytes(52)
    + b"PK\6\7"
    + bytes(16)
    + b"PK\5\6"
    + bytes(18),
    "a comment that is not there": archive(HARMLESS)[:-2] + b"\5\0",
    "four pickles": b"".join([HARMLESS] * 4),
    "text": b"weights",
}
"""Files that no torch.load opens as weights, or that run nothing by themselves."""


@pytest.mark.parametrize("name", ODD)
def test_what_no_torch_save_wrote_is_refused(tmp_path, name):
    path = write(tmp_path, ODD[name])
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin"):
        check_pickles(Folder.open(tmp_path), [path.name])


@pytest.mark.parametrize(
    "bomb",
    [
        archive(b"\x80\x02" + b"N0" * 2**24 + b"N.", method=zipfile.ZIP_DEFLATED),
        archive(b"\x80\x02" + b"N0" * 2**24 + b"N."),
        legacy(b"\x80\x02X" + struct.pack("<I", 2**31) + b"x"),
        archive(b"\x80\x02\x8a\xff" + bytes(255) + b"\x8b" + struct.pack("<i", 2**31 - 1)),
        archive(b"\x80\x02]q\0" + b"(h\0h\0tq\0" * 1000 + b"\x94."),
        archive(b"\x80\x022" + b"2" * 100 + b"."),
    ],
    ids=["compressed", "large", "long text", "long number", "memo", "doubled"],
)
def test_a_bomb_is_refused_before_it_grows(tmp_path, bomb):
    path = write(tmp_path, bomb)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=r"pytorch_model\.bin"):
            check_pickles(Folder.open(tmp_path), [path.name])
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**24
    finally:
        tracemalloc.stop()


def test_what_cannot_be_checked_is_not_called_code(tmp_path):
    path = write(tmp_path, archive(b"\x80\x02ctorch\nper_tensor_affine\n."))
    with pytest.raises(
        ArtifactError, match=r"may hold code: it has a call of torch\.per_tensor_affine"
    ):
        check_pickles(Folder.open(tmp_path), [path.name])


@pytest.mark.parametrize(
    "content",
    [
        archive(HARMLESS),
        legacy(HARMLESS),
        archive(HARMLESS, more=[(f"archive/data/{i}", b"") for i in range(80)]),
    ],
    ids=["archives", "legacy", "directories"],
)
def test_all_files_of_a_model_are_bounded_together(tmp_path, monkeypatch, content):
    """As links to one file, which cost whoever made the folder nothing."""
    write(tmp_path, content)
    names = [f"{i}.bin" for i in range(8)]
    for name in names:
        (tmp_path / name).symlink_to("pytorch_model.bin")
    monkeypatch.setattr(tensor_files, "_MAX_PICKLE_BYTES", 4 * 8192)
    monkeypatch.setattr(tensor_files, "_MIN_PICKLE_BYTES", 4096)
    folder = Folder.open(tmp_path)
    check_pickles(folder, names[:2])
    monkeypatch.setattr(tensor_files, "_MAX_PICKLE_BYTES", 4 * 4096)
    with pytest.raises(ArtifactError, match=r"[1-4]\.bin has .*16384 with the files before it"):
        check_pickles(folder, names)


def test_a_tar_header_that_declares_all_memory(tmp_path):
    """Its extended header is as long as the file, most of which is a hole."""
    member = tarfile.TarInfo("\x80\x02N.")
    member.type, member.size = tarfile.XHDTYPE, 1 << 36
    path = write(tmp_path, member.tobuf(tarfile.GNU_FORMAT, "latin-1"))
    os.truncate(path, 1 << 37)
    with pytest.raises(ArtifactError, match="both pickles and a tar file"):
        check_pickles(Folder.open(tmp_path), [path.name])


def test_sizes_of_64_bits_that_torch_writes_are_taken(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "pytorch_model.bin"
    with torch.serialization.skip_data():  # holes on the disk
        torch.save({"a": torch.empty(5 << 28), "b": torch.empty(1)}, path)
    assert path.stat().st_size > 2**32
    check_pickles(Folder.open(tmp_path), [path.name])


def test_what_torch_saves_is_taken(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {
        str(dtype): torch.zeros(3, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool)
    }
    tensors |= {"parameter": torch.nn.Parameter(torch.zeros(2)), "view": torch.zeros(4, 4).T[1:]}
    tensors |= {"set": {1}, "complex": 1j, "bytes": bytearray(b"a")}
    tensors |= {"size": torch.Size([1]), "sparse": torch.zeros(2, 2).to_sparse(), "text": "ä" * 999}
    for zipped in (False, True):
        if zipped:  # the old format has no such type
            tensors["float8"] = torch.zeros(3, dtype=torch.float8_e4m3fn)
        path = tmp_path / "pytorch_model.bin"
        torch.save(OrderedDict(tensors), path, _use_new_zipfile_serialization=zipped)
        torch.load(path, weights_only=True)
        check_pickles(Folder.open(tmp_path), [path.name])


def test_every_instruction_and_function_is_one_that_torch_takes():
    """And of its functions only those are not taken here that no checkpoint of a language model has."""
    torch = pytest.importorskip("torch")
    from torch import _weights_only_unpickler as reference

    codes = {one.name: one.code.encode("latin-1") for one in pickletools.opcodes}
    for name, code in codes.items():
        taken = True
        try:
            reference.get_globals_in_pkl(io.BytesIO(code + bytes(9)))
        except (EOFError, UnicodeDecodeError, IndexError, struct.error):
            pass
        except pickle.UnpicklingError as error:
            taken = f"operand {code[0]}" not in str(error)
        assert taken is bool(tensor_files._INSTRUCTIONS.fullmatch(name)), name
    allowed = list(reference._get_allowed_globals().values())
    for module in (torch, torch.storage, torch._utils, torch._tensor, torch.serialization):
        for name in dir(module):
            if tensor_files._HARMLESS.fullmatch(f"{module.__name__} {name}"):
                value = getattr(module, name)
                assert any(value is one for one in allowed) or name.endswith("Storage"), name
