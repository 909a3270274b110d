"""LoRA adapters of a model: found by options, in its folder or by requests; fetched, converted and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from djl_python_neuronx.artifacts import adapters, fetch
from djl_python_neuronx.artifacts.adapters import Adapter
from djl_python_neuronx.artifacts.cache import Progress
from djl_python_neuronx.artifacts.folder import Folder, reading
from djl_python_neuronx.artifacts.manifest import contents_digest
from djl_python_neuronx.config import sources
from djl_python_neuronx.config.lora_options import NAME
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactNotFoundError,
    ConfigError,
    RequestError,
)
from djl_python_neuronx.loading.find import Model
from djl_python_neuronx.loading.guarded_job import do_job, run_guarded
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.situation import Situation
from djl_python_neuronx.planning.lora import MODULES, layer_shapes
from djl_python_neuronx.planning.model import ModelFacts

_TARGETS = "lora_target_modules"


def find_adapters(
    model: Model, settings: Resolved, backend: str, situation: Situation
) -> tuple[Resolved, tuple[Adapter, ...]]:
    """Find the adapters of a model in the order of their places, and the settings with the layers that they change.

    Those of the options come first, then those beside the model, by name. What is wrong goes to the problems.
    """
    options, found = settings.options, list[Adapter]()
    if not options.enable_lora or backend == "tnx":  # which refuses the option
        return settings, ()
    origin = f"option.adapters, {settings.origins.get('adapters', 'default')}"
    with situation.problems.catch():
        for name, (place, root) in _listed(options, model).items():
            with situation.problems.catch():
                if options.simulated:
                    found.append(Adapter(name, place, Path(place), {}, {}))
                else:
                    found.append(
                        obtain(
                            name, place, options, model.facts, situation.environ,
                            origin=origin, root=root, is_dry=situation.is_dry,
                            progress=situation.progress.transfer,
                        )
                    )  # fmt: skip
        _check(found, options, model)
    if options.lora_target_modules is None:
        modules = {name for one in found for name in one.modules}
        known = modules or {path.rpartition(".")[2] for path in layer_shapes(model.facts)}
        chosen = tuple(name for name in MODULES if name in known)
        why = "default: those of the adapters" if modules else "default: all"
        settings = replace(
            settings,
            options=options.model_copy(update={_TARGETS: chosen}),
            origins=MappingProxyType({**settings.origins, _TARGETS: why}),
        )
    return settings, tuple(found)


def obtain(
    name: str,
    place: str,
    options: ServingOptions,
    model: ModelFacts,
    environ: Mapping[str, str],
    *,
    origin: str,
    root: Path | None = None,
    is_dry: bool = False,
    progress: Progress | None = None,
) -> Adapter:
    """Fetch an adapter, convert it to safetensors unless it is stored so, and check it against model and options.

    `place`: a folder, relative to that of the model, a Hugging Face id with `@` and a revision, or a URI. `root`: the
    model folder that the adapter is a part of. `is_dry`: fetch and convert nothing.

    Raises:
        ServingError: it cannot be fetched, converted or served.
    """
    check_name(name, options)
    folder = fetch.local_folder(place, options.model_dir)
    if folder is None:
        is_uri = fetch.uri_scheme(place) is not None
        source, at, revision = (place, "", "") if is_uri else place.partition("@")
        # Not a name without an owner, which may be that of a folder that is missing.
        if not is_uri and not ("/" in source and fetch.is_hub_id(source)):
            msg = (
                f"there is no folder {place!r} (from {origin}); expected one of an adapter, owner/name of the hub, or "
                "s3://bucket/folder"
            )
            raise ArtifactNotFoundError(msg)
        if is_dry:
            return Adapter(name, place, Path(place), {}, {})
        folder = fetch.fetch(
            source,
            environ=environ,
            root=fetch.download_root(environ),
            revision=revision if at else None,
            selection=adapters.FILES,
            progress=progress,
            origin=origin,
        )
    adapter = adapters.read(folder, name, place, root)
    if not adapter.tensors and not is_dry:
        adapter = adapters.read(_converted(folder, environ), name, place)
    adapters.check(adapter, model, options.max_lora_rank, options.lora_target_modules or ())
    return adapter


def check_name(name: str, options: ServingOptions) -> None:
    """Refuse a name that cannot be an adapter's.

    Raises:
        ConfigError: it has other characters, is too long, or is a name of the model.
    """
    if not re.fullmatch(NAME, name):
        msg = f"{shortened(name)!r} cannot name an adapter; expected at most 128 ASCII letters, digits and ._:@+-"
        raise ConfigError(msg)
    if name in options.model_names:
        msg = f"the adapter {name!r} has the name of the model; give it another, or set option.model_name"
        raise ConfigError(msg)


def fetch_allowed(prepared: Prepared, name: str, source: str) -> Path:
    """The checked folder of an adapter from a place of `option.adapter_sources`, or from its own at the start.

    Raises:
        ServingError: the source is another place, or the adapter cannot be fetched or served.
    """
    options, facts = prepared.options, prepared.case.model
    places = [*(options.adapter_sources or ())]
    own = [one.place for one in prepared.adapters if one.name == name]
    if not source.isprintable() or not any(is_below(source, one) for one in (*own, *places)):
        msg = (
            f"the adapter {name[:200]!r} may not come from {source[:200]!r}; expected a place of "
            f"option.adapter_sources, or one below it: {', '.join(places) or 'none is set'}"
        )
        raise RequestError(msg)
    return obtain(name, source, options, facts, prepared.environ, origin="the request").folder


def is_below(source: str, place: str) -> bool:
    """True if a source is a place of `option.adapter_sources`, or lies below it."""
    if place.startswith("/"):
        found = Path(source).resolve()
        return source.startswith("/") and found.is_relative_to(Path(place).resolve())
    name = source if "://" in source else source.partition("@")[0]  # a hub's name has a revision
    return ".." not in name.split("/") and f"{name}/".startswith(f"{place.rstrip('/')}/")


def _listed(options: ServingOptions, model: Model) -> dict[str, tuple[str, Path | None]]:
    """Name to the place of each adapter, and to the model folder that it is a part of."""
    listed: dict[str, tuple[str, Path | None]] = {
        name: (place, None) for name, place in (options.adapters or {}).items()
    }
    for folder in dict.fromkeys([options.model_dir, model.artifact.path]):
        if folder is None or not sources.try_path((folder / adapters.FOLDER).is_dir, failed=False):
            continue
        with reading(folder):
            inside = Folder.open(folder).sub(adapters.FOLDER)
        for name in sorted(one for one in inside.folders if not one.startswith(".")):
            place = str(inside.path / name)
            if listed.setdefault(name, (place, folder))[0] != place:
                msg = f"two adapters are named {name!r}: {listed[name][0]} and {place}; rename one"
                raise ConfigError(msg)
    return listed


def _check(found: Collection[Adapter], options: ServingOptions, model: Model) -> None:
    if len(found) > options.max_loras:
        names = ", ".join(one.name for one in found)
        msg = f"there are {len(found)} adapters ({names}), and max_loras is {options.max_loras}; raise option.max_loras"
        raise ConfigError(msg)
    known = {path.rpartition(".")[2] for path in layer_shapes(model.facts)}
    if others := sorted({*(options.lora_target_modules or ())} - known) if model.whole else []:
        has = ", ".join(sorted(known)) or "none of known sizes"
        msg = f"option.{_TARGETS} has {', '.join(others)}; adapters of this model change {has}"
        raise ConfigError(msg)


def _converted(folder: Path, environ: Mapping[str, str]) -> Path:
    """The folder of an adapter with safetensors in place of pickled tensors, converted once for all processes.

    Raises:
        ArtifactError: it is damaged.
        ArtifactAccessError: it cannot be converted here.
    """
    with reading(folder):
        names = adapters.FILES.choose([path.name for path in folder.iterdir()])
        digest = contents_digest(folder, names)
    target = fetch.download_root(environ) / adapters.FOLDER / digest
    if not target.is_dir():
        job = json.dumps([str(folder), str(target)]).encode()

        def ended(status: int) -> ArtifactAccessError:
            return ArtifactAccessError(
                f"the conversion of {folder} to safetensors ended with status {status}"
            )

        run_guarded(__name__, job, environ, ended)
    return target


def main() -> None:
    """Convert an adapter in a process that has torch."""
    do_job(_convert, lambda error: ArtifactAccessError(f"an adapter cannot be converted: {error}"))


def _convert(job: bytes) -> bytes:
    from djl_python_neuronx.artifacts.convert import convert_adapter  # with torch

    convert_adapter(*map(Path, json.loads(job)))
    return b""
