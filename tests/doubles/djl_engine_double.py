"""A double of DJL's Python engine: run it like `djl_python_engine.py`; handlers see it as `djl_python`.

Written from the wire format and the observed behaviour of djl-serving d21927c; `test_djl_contract.py` compares its
bytes with the real engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import json
import socket
import struct
import sys
import threading
import traceback
import types
from pathlib import Path

ACCEPT_TIMEOUT_S = 30.0
TRACKING_ID = "request_tracking_id"


class Connection:
    """Blocking reads of the big-endian wire."""

    def __init__(self, sock):
        self._file = sock.makefile("rb")

    def close(self):
        """Without it the socket stays open, whoever closes that."""
        self._file.close()

    def read(self, count):
        data = self._file.read(count)
        if len(data) != count:
            raise EOFError("disconnected")
        return data

    def short(self):
        return struct.unpack(">h", self.read(2))[0]

    def int(self):
        return struct.unpack(">i", self.read(4))[0]

    def string(self):
        length = self.int()
        return None if length < 0 else self.read(length).decode()


def encoded_string(value):
    if value is None:
        return struct.pack(">i", -1)
    data = value.encode()
    return struct.pack(">i", len(data)) + data


class PairList:
    """Keys and values in order; keys may repeat or be None."""

    def __init__(self):
        self.keys, self.values = [], []

    def add(self, key=None, value=None):
        if value is not None:
            self.keys.append(key)
            self.values.append(value)

    def size(self):
        return len(self.keys)

    def is_empty(self):
        return not self.keys

    def get(self, key):
        return self.values[self.keys.index(key)] if key in self.keys else None

    def key_at(self, index):
        return self.keys[index]

    def value_at(self, index):
        return self.values[index]

    def get_keys(self):
        return self.keys

    def get_values(self):
        return self.values


class Input:
    """A call: properties and named contents."""

    def __init__(self):
        self.properties = {}
        self.content = PairList()
        self.function_name = None

    @classmethod
    def read(cls, connection):
        found = cls()
        for _ in range(connection.short()):
            key = connection.string()
            found.properties[key] = connection.string()
        for _ in range(connection.short()):
            key = connection.string()
            found.content.add(key, bytearray(connection.read(connection.int())))
        found.function_name = found.properties.get("handler")
        return found

    def get_function_name(self):
        return self.function_name

    def is_batch(self):
        return "batch_size" in self.properties

    def get_batch_size(self):
        return int(self.properties.get("batch_size", "1"))

    def get_batches(self):
        """One `Input` per row; a row's number is the three digits after ``batch_``."""
        if not self.is_batch():
            return [self]
        rows = [Input() for _ in range(self.get_batch_size())]
        for key, value in self.properties.items():
            if key.startswith("batch_") and key != "batch_size":
                rows[int(key[6:9])].properties[key[10:]] = value
        for key, value in zip(self.content.keys, self.content.values, strict=True):
            rows[int(key[6:9])].content.add(key[10:], value)
        return rows

    def get_properties(self):
        return self.properties

    def get_property(self, key):
        return next(
            (value for name, value in self.properties.items() if name.lower() == key.lower()), None
        )

    def get_content(self):
        return self.content

    def contains_key(self, key):
        return self.content.get(key) is not None

    def is_empty(self):
        return self.content.is_empty()

    def get_as_bytes(self, key=None):
        if self.content.is_empty():
            return None
        if key:
            found = self.content.get(key)
            if found is None:
                raise KeyError(f"requested data for key:{key} is not found!")
            return found
        found = self.content.get("data")
        return self.content.value_at(0) if found is None else found


class Output:
    """An answer: status, properties, and named contents or a stream."""

    def __init__(self, code=200, message="OK"):
        self.code, self.message = code, message
        self.properties = {}
        self.content = PairList()
        self.stream_content = None
        self.stream_output_formatter = None

    def error(self, error, code=424, message="invoke handler failure"):
        self.code, self.message = code, message
        self.add_property("content-type", "application/json")
        return self.add({"code": code, "message": message, "error": error})

    def add_property(self, key, val):
        self.properties[key] = val
        return self

    def get_properties(self):
        return self.properties

    def add(self, value, key=None, batch_index=None):
        if batch_index is not None:
            key = f"batch_{batch_index}.{key or ''}"
        if isinstance(value, str):
            value = value.encode()
        elif not isinstance(value, (bytes, bytearray)):
            value = self._json(value)
        self.content.add(key, bytearray(value))
        return self

    def add_stream_content(self, stream_content, output_formatter):
        self.stream_content, self.stream_output_formatter = stream_content, output_formatter
        return self

    @staticmethod
    def binary_encode(data):
        fields = b"".join(
            encoded_string(key) + encoded_string(str(value)) for key, value in data.items()
        )
        return bytearray(struct.pack(">h", len(data)) + fields)

    def send(self, sock):
        head = (
            struct.pack(">h", self.code)
            + encoded_string(self.message)
            + struct.pack(">h", len(self.properties))
        )
        head += b"".join(
            encoded_string(key) + encoded_string(str(value))
            for key, value in self.properties.items()
        )
        if self.stream_content is not None:
            sock.sendall(head + struct.pack(">h", -1))
            self._send_chunks(sock)
            return
        contents = [
            encoded_string(key) + struct.pack(">i", len(value)) + value
            for key, value in zip(self.content.keys, self.content.values, strict=True)
        ]
        sock.sendall(head + struct.pack(">h", len(contents)) + b"".join(contents))

    def _send_chunks(self, sock):
        last = b""
        try:
            for chunk in self.stream_content:
                data = (
                    chunk
                    if self.stream_output_formatter is None
                    else self.stream_output_formatter(chunk)
                )
                if isinstance(data, str):
                    data = data.encode()
                elif not isinstance(data, (bytes, bytearray)):
                    data = self._json(data)
                sock.sendall(struct.pack(">bi", 1, len(data)) + data)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  (so does the real one: the text is the last chunk)
            last = str(error).encode()
        sock.sendall(struct.pack(">bi", 0, len(last)) + last)

    @staticmethod
    def _json(value):
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, indent=2, separators=(",", ":")
        ).encode()


class SyncEngine:
    """One call at a time."""

    def __init__(self, arguments, module):
        self.arguments, self.module = arguments, module
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.settimeout(ACCEPT_TIMEOUT_S)
        self.sock = self.connection = None

    def accept(self):
        self.listener.bind(self.arguments.sock_name)
        self.listener.listen(128)
        print("Python engine started.", flush=True)  # noqa: T201  (Java waits for it)
        self.sock, _ = self.listener.accept()
        self.sock.setblocking(True)
        self.connection = Connection(self.sock)

    def read(self):
        inputs = Input.read(self.connection)
        if self.arguments.cluster_size:
            inputs.properties["cluster_size"] = self.arguments.cluster_size
        inputs.properties["device_id"] = self.arguments.device_id
        inputs.properties["model_dir"] = self.arguments.model_dir
        return inputs

    def invoke(self, inputs):
        return getattr(self.module, inputs.get_function_name())(inputs)

    def run(self):
        self.accept()
        while True:
            inputs = self.read()
            try:
                output = checked(self.invoke(inputs))
            except Exception as error:  # noqa: BLE001  (DJL's border, not ours)
                output = failed(error)
            output.send(self.sock)


class AsyncEngine(SyncEngine):
    """Calls overlap on an event loop; one thread reads, one writes."""

    def __init__(self, arguments, module):
        super().__init__(arguments, module)
        self.outputs = asyncio.Queue()
        self.gone = threading.Event()

    def run(self):
        asyncio.run(self._run())

    async def _run(self):
        loop = asyncio.get_running_loop()
        self.accept()
        for target in (self._read_all, self._write_all):
            threading.Thread(target=target, args=(loop,), daemon=True).start()
        await loop.run_in_executor(None, self.gone.wait)

    def _read_all(self, loop):
        try:
            while True:
                asyncio.run_coroutine_threadsafe(self._serve(self.read()), loop)
        except (EOFError, OSError):
            self.gone.set()

    def _write_all(self, loop):
        try:
            while True:
                asyncio.run_coroutine_threadsafe(self.outputs.get(), loop).result().send(self.sock)
        except OSError:
            self.gone.set()

    async def _serve(self, inputs):
        tracking_id = inputs.get_property(TRACKING_ID)
        try:
            answer = await self.invoke(inputs)
        except Exception as error:  # noqa: BLE001  (DJL's border, not ours)
            answer = failed(error, message="service.invoke_handler_async() failure")
        if inspect.isasyncgen(answer):
            # An exception in here is nobody's, as in the real one: the client waits for ever.
            async for output in answer:
                await self.outputs.put(output.add_property(TRACKING_ID, tracking_id))
            return
        await self.outputs.put(checked(answer).add_property(TRACKING_ID, tracking_id))


def checked(answer):
    if answer is None:
        return Output(204, "No content")
    return (
        answer
        if isinstance(answer, Output)
        else Output().error(f"Invalid output type: {type(answer)}")
    )


def failed(error, **more):
    traceback.print_exception(error)
    if isinstance(error, MemoryError):
        return Output(507, str(error))
    return Output().error(str(error), **more)


def installed():
    """A module as handlers import it; register it as ``sys.modules["djl_python"]``."""
    module = types.ModuleType("djl_python")
    module.Input, module.Output = Input, Output
    return module


def entry_module(entry_point, model_dir):
    """A file of the model folder, or an importable module."""
    if not entry_point.endswith(".py"):
        return importlib.import_module(entry_point)
    file = Path(model_dir) / entry_point
    name = f"model_{hashlib.md5(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser()
    for name in ("--sock-type", "--sock-name", "--model-dir", "--entry-point", "--log-level"):
        parser.add_argument(name, required=True)
    parser.add_argument("--recommended-entry-point")
    parser.add_argument("--device-id", default="-1")
    parser.add_argument("--cluster-size", type=int)
    parser.add_argument("--async-mode", action=argparse.BooleanOptionalAction)
    arguments = parser.parse_args()
    sys.modules["djl_python"] = installed()
    module = entry_module(arguments.entry_point, arguments.model_dir)
    engine = AsyncEngine if arguments.async_mode else SyncEngine
    try:
        engine(arguments, module).run()
    except (EOFError, OSError) as error:
        print(f"engine ended: {error}", flush=True)  # noqa: T201  (its log)
    return 1


if __name__ == "__main__":
    sys.exit(main())
