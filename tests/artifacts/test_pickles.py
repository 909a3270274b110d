"""Ways to hide code in a file of `torch.save`. Loaded without limits each runs it; the check refuses each.

The check's reference is torch's weights-only loader: what that one refuses is refused, what `torch.save` writes is not.
"""

from __future__ import annotations

import io
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
from djl_python_neuronx.artifacts.tensor_files import check_pickle
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
    path.write_bytes(content() if callable(content) else content)
    return path


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", EVASIONS)
def test_it_is_refused_and_would_run(tmp_path, name):
    path = write(tmp_path, EVASIONS[name])
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin"):
        check_pickle(Folder.open(tmp_path), path.name)
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
    "four pickles": b"".join([HARMLESS] * 4),
    "text": b"weights",
}
"""Files that no torch.load opens as weights, or that run nothing by themselves."""


@pytest.mark.parametrize("name", ODD)
def test_what_no_torch_save_wrote_is_refused(tmp_path, name):
    path = write(tmp_path, ODD[name])
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin"):
        check_pickle(Folder.open(tmp_path), path.name)


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
            check_pickle(Folder.open(tmp_path), path.name)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**24
    finally:
        tracemalloc.stop()


def test_what_torch_saves_is_taken(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {
        str(dtype): torch.zeros(3, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool)
    }
    tensors |= {"parameter": torch.nn.Parameter(torch.zeros(2)), "view": torch.zeros(4, 4).T[1:]}
    tensors |= {"size": torch.Size([1]), "sparse": torch.zeros(2, 2).to_sparse(), "text": "ä" * 999}
    for zipped in (False, True):
        if zipped:  # the old format has no such type
            tensors["float8"] = torch.zeros(3, dtype=torch.float8_e4m3fn)
        path = tmp_path / "pytorch_model.bin"
        torch.save(OrderedDict(tensors), path, _use_new_zipfile_serialization=zipped)
        torch.load(path, weights_only=True)
        check_pickle(Folder.open(tmp_path), path.name)


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
