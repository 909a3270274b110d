"""How fast an object of S3 arrives, next to `aws s3 cp` and to what the server can give.

    .venv/bin/python benchmarks/s3_rate.py --aws /path/to/aws [--gib 1] [--rounds 5] [--json]

Needs nginx and curl, and the AWS command line (`pip install awscli`, in a separate environment: it pins botocore).
nginx serves one object with Range, If-Match and ETag, as S3 does, and a listing of it. Each row is a process of its
own, from its start to its end, writes to the same disk, and takes its turn in every round; dirty pages are written out
between turns. `curl`, one stream to a file, shows what the server can do on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson

NGINX = """
daemon off;
pid {work}/nginx.pid;
error_log stderr warn;
worker_processes 2;
events {{ worker_connections 512; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location = /bench {{ default_type application/xml; alias {work}/listing.xml; }}
        location = /bench/ {{ default_type application/xml; alias {work}/listing.xml; }}
        location /bench/ {{ default_type application/octet-stream; alias {work}/bucket/; }}
    }}
}}
"""
LISTING = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bench</Name><Prefix>model/</Prefix>
<KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated><Contents>
<Key>model/model.safetensors</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>
<ETag>{etag}</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents></ListBucketResult>
"""
OURS = """
import sys
from pathlib import Path
from djl_python_neuronx.artifacts import s3
s3.fetch("s3://bench/model", Path(sys.argv[1]), {})
"""
NEAR = 0.9
"""At this share of curl's rate the server, not the client, sets the pace."""


@contextlib.contextmanager
def served(work: Path, num_bytes: int) -> Iterator[str]:
    """An endpoint with one object, made of bytes that do not repeat."""
    place = work / "bucket" / "model" / "model.safetensors"
    place.parent.mkdir(parents=True)
    with place.open("wb") as file:
        for _ in range(num_bytes // 2**24):
            file.write(os.urandom(2**24))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (work / "listing.xml").touch()
    (work / "nginx.conf").write_text(NGINX.format(work=work, port=port))
    # Its workers would otherwise be another user's, who may not look into our folder.
    user = ["-g", "user root;"] if os.geteuid() == 0 else []
    nginx = subprocess.Popen(["nginx", "-p", work, "-c", work / "nginx.conf", *user])
    url = f"http://127.0.0.1:{port}"
    try:
        for attempt in range(100):
            try:
                head = urllib.request.Request(f"{url}/bench/model/model.safetensors", method="HEAD")
                with urllib.request.urlopen(head) as answer:
                    etag = answer.headers["ETag"].replace('"', "&quot;")
                break
            except OSError:
                if attempt == 99 or nginx.poll() is not None:
                    raise
                time.sleep(0.05)
        (work / "listing.xml").write_text(
            LISTING.format(etag=etag, size=place.stat().st_size), encoding="utf-8"
        )
        yield url
    finally:
        nginx.terminate()
        nginx.wait()


def main() -> int:
    """Print one row per client: rates in MiB/s, and what they are to the others'."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aws", default=shutil.which("aws"), help="the AWS command line")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="a folder on the disk to write to")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    num_bytes = int(arguments.gib * 64) * 2**24
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        with served(work, num_bytes) as url:
            rates = measure(arguments, work, url, num_bytes)
    report(rates, as_json=arguments.json)
    return 0


def measure(
    arguments: argparse.Namespace, work: Path, url: str, num_bytes: int
) -> dict[str, list[float]]:
    """MiB/s of each round, by client."""
    target = work / "target"
    object_url, uri = f"{url}/bench/model/model.safetensors", "s3://bench/model/model.safetensors"
    commands: dict[str, list[str | Path]] = {
        "curl": ["curl", "-s", "-o", target / "file", object_url],
        "ours": [sys.executable, "-c", OURS, target],
    }
    if arguments.aws:
        commands["aws s3 cp"] = [arguments.aws, "s3", "cp", "--quiet", uri, target / "file"]
    else:
        print("no AWS command line: pass --aws, or see this file's head", file=sys.stderr)
    environ = {
        **os.environ,
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
    }
    rates: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(arguments.rounds + 1):
        for name, command in commands.items():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            os.sync()
            started_s = time.perf_counter()
            subprocess.run(command, check=True, env=environ)
            seconds = time.perf_counter() - started_s
            [loaded] = [p for p in target.rglob("*") if p.is_file() and p.stat().st_size > 2**20]
            if loaded.stat().st_size != num_bytes:
                sys.exit(f"{name} loaded {loaded.stat().st_size} bytes of {num_bytes}")
            if turn:  # the first warms the file cache
                rates[name].append(num_bytes / 2**20 / seconds)
    return rates


def report(rates: dict[str, list[float]], *, as_json: bool) -> None:
    """One line per client."""
    median = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        row: dict[str, object] = {
            "client": name,
            "median_mib_per_s": round(median[name]),
            "rounds": [round(value) for value in values],
            "ratio_to_curl": round(median[name] / median["curl"], 2),
        }
        if "aws s3 cp" in median:
            row["ratio_to_aws"] = round(median[name] / median["aws s3 cp"], 2)
        if name != "curl" and median[name] >= NEAR * median["curl"]:
            row["note"] = "bounded by the server or the disk, as curl is"
        print(
            orjson.dumps(row).decode() if as_json else "  ".join(f"{k}={v}" for k, v in row.items())
        )


if __name__ == "__main__":
    sys.exit(main())
