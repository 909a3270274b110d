"""The recipes of `configs/` with the stored configurations of their models: for docs/recipes.md and the tests.

Nothing is downloaded. The configurations are facts of public checkpoints; tests compare their parameter counts with the
published ones.
"""

from __future__ import annotations

import math
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.loading.check import Placement, check_all
from djl_python_neuronx.loading.report import all_as_json
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
_MODELS = ROOT / "tests" / "planning" / "models"
_COMMIT = "0" * 40

_HEAD = """\
# Recipes

Generated from `configs/` by `make docs`, with what `djl-neuronx check` computes of each file. Edit the files there and
`tools/recipes.py`, not this page.

The models that DJL Serving's Neuron container (LMI) documented and tested, and those that NxD Inference lists as ready
for production. Each file is a model folder's `serving.properties`, and serves as it is:

<!-- needs: device -->
```sh
djl-neuronx check configs/llama3-8b-inf2.properties --instance inf2.8xlarge
djl-neuronx serve configs/llama3-8b-inf2.properties                     # on the machine
```

They were planned, not run: no machine with Neuron devices was at hand. Tests check each with its stored `config.json`,
and with those of the other models that it is for: no error, no warning that its comment does not explain, memory within
19/20 of a core's. Those with contributed code (`option.nxdi_model_code`: gemma2-9b-inf2, phi3-mini-inf2) are checked
with an S3 URI in place of the code's folder, which a check does not read. Where that folder is missing, `check` refuses
the files as they are; `-o nxdi_model_code=s3://contrib/gemma-2-9b` checks all but the code.

What was run, and where, is in [architectures.md](architectures.md) and [hardware-reports.md](hardware-reports.md).

**Another model.** A fine-tune has its base model's `config.json` up to vocabulary and length: take the base model's
file, set `option.model_id`, and run `check`, which refuses what does not fit. vicuna, open_llama and CodeLlama are
Llamas of the same sizes, gpt4all-j is GPT-J, stablelm-tuned-alpha is GPT-NeoX.

**Another machine.** `option.tensor_parallel_degree` is the number of cores of a copy; without it `check` takes the one
with the shortest decode step. More slots, or longer ones, need the memory that the table shows.

## Plans

*Copies*: as many as `option.replicas=max` puts on the machine. *Library*: `nxdi` is NxD Inference, `tnx` is
transformers-neuronx; of two the first is taken where both are installed. *Core*: GiB of a core's memory, with 1 GiB of
headroom, of what it has. *Host*: GiB of the host's memory that a load takes at its peak, of what it has. *Compile*:
rough minutes of the first load, nothing cached ([check.md](check.md#what-it-assumes)).
"""

_TAIL = """\
## Without a recipe

| model | reason |
| --- | --- |
| Llama 4, Llama 3.2 Vision, Pixtral, Qwen2-VL, Qwen3-VL | they take images, which is not served yet |
| FLUX.1, Stable Diffusion, Whisper | they make images, or take sound: no language model |
| Gemma 3 | NxD Inference's class gives wrong answers; [contributed code](nxdi.md#models-outside-the-library) is right |
| gpt_bigcode-santacoder | it has 2048 positions: starcoder-inf2 with `option.n_positions=2048` and its lengths |
| Qwen2.5-1.5B | users report that compilers crash on it: `check` names the threads |
| Granite 3.1, OLMo 2, SmolLM3, GLM-4 … | contributed code: as in phi3-mini-inf2, with the folder of the model |

Code that NxD Inference's package lacks is judged by its SHA-256, on the machine that has it:
[nxdi.md](nxdi.md#models-outside-the-library) has the options, [architectures.md](architectures.md) what is right.
"""

CHECKPOINTS: Mapping[str, str] = {
    "EleutherAI/gpt-j-6b": "gpt-j-6b",
    "EleutherAI/gpt-neox-20b": "gpt-neox-20b",
    "EleutherAI/pythia-2.8b": "pythia-2.8b",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-14B-Instruct": "qwen2.5-14b",
    "Qwen/Qwen2.5-32B-Instruct": "qwen2.5-32b",
    "Qwen/Qwen2.5-3B-Instruct": "qwen2.5-3b",
    "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama-1.1b",
    "bigcode/starcoder": "starcoder",
    "bigscience/bloom": "bloom-176b",
    "bigscience/bloom-7b1": "bloom-7b1",
    "bigscience/bloomz": "bloom-176b",
    "bigscience/bloomz-7b1": "bloom-7b1",
    "codellama/CodeLlama-7b-Instruct-hf": "codellama-7b",
    "databricks/dbrx-instruct": "dbrx",
    "databricks/dolly-v2-12b": "dolly-v2-12b",
    "facebook/opt-1.3b": "opt-1.3b",
    "facebook/opt-13b": "opt-13b",
    "facebook/opt-30b": "opt-30b",
    "facebook/opt-66b": "opt-66b",
    "facebook/opt-iml-max-30b": "opt-30b",
    "google/gemma-2-9b-it": "gemma-2-9b",
    "meta-llama/Llama-2-13b-chat-hf": "llama-2-13b",
    "meta-llama/Llama-2-70b-chat-hf": "llama-2-70b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "meta-llama/Llama-3.1-405B-Instruct": "llama-3.1-405b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-3.2-1b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama-3.2-3b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Meta-Llama-3-70B-Instruct": "llama-3-70b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "microsoft/Phi-3-mini-4k-instruct": "phi-3-mini-4k",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral-7b-instruct-v0.2",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-instruct-v0.3",
    "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-xl": "gpt2-xl",
}
"""Ids of the Hub, each with the file of its configuration."""


def configuration(model_id: str) -> bytes:
    """The stored config.json of a model of the Hub."""
    return (_MODELS / f"{CHECKPOINTS[model_id]}.json").read_bytes()


@dataclass(frozen=True)
class Recipe:
    """A file of `configs/`, with what its first comment says of it."""

    path: Path
    comment: str
    """The first comment, as one line."""
    model_id: str
    code: str | None
    """Code of the model outside its library (`nxdi_model_code`)."""

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read a file."""
        text = path.read_text(encoding="utf-8")
        head = text.partition("\nengine=")[0].splitlines()
        comment = " ".join(line.removeprefix("#").strip() for line in head)
        (model_id,) = re.findall(r"^option\.model_id=(.*)$", text, re.MULTILINE)
        code = re.findall(r"^option\.nxdi_model_code=(.*)$", text, re.MULTILINE)
        return cls(path, comment, model_id, *(code or [None]))

    @property
    def instance(self) -> str | None:
        """The smallest instance type that it is for: the first that the comment names; None: it needs no device."""
        found = re.search(r"\b(inf|trn)\w*\.\w+", self.comment)
        return found and found[0]

    @property
    def others(self) -> list[str]:
        """Further models that the same file serves with another `model_id`."""
        found = re.search(r"Also for (.+?)\.(?: |$)", self.comment)
        return re.findall(r"[\w.-]+/[\w.-]*\w", found[1]) if found else []

    def placed(self, contrib: str = "s3://contrib/models") -> dict[str, str]:
        """The option of its code, below another folder; a check reads nothing of S3."""
        return {"nxdi_model_code": f"{contrib}/{Path(self.code).name}"} if self.code else {}

    def checked(self, environ: Mapping[str, str], **overrides: str) -> Placement:
        """Check the file for its instance type, with options of the command line."""
        machine = machines.named(self.instance) if self.instance else None
        return check_all(
            [str(self.path)],
            environ=environ,
            overrides={**self.placed(), **overrides},
            machine=machine,
        )


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    return [Recipe.read(path) for path in sorted(CONFIGS.glob("*.properties"))]


def offline(cache: Path) -> dict[str, str]:
    """Fill a cache of the Hub with the stored configurations; return the variables that make it the only source."""
    for model_id in CHECKPOINTS:
        folder = cache / f"models--{model_id.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(_COMMIT)
        snapshot = folder / "snapshots" / _COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_bytes(configuration(model_id))
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def page() -> str:
    """Text of docs/recipes.md."""
    with tempfile.TemporaryDirectory() as folder:
        environ = offline(Path(folder) / "hub")
        rows = [row for recipe in recipes() for row in _row(recipe, environ)]
    head = [
        "| recipe | machine | library | degree | copies | slots | length | core | host | compile |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    files = [line for recipe in recipes() for line in _described(recipe)]
    return "\n".join([_HEAD, *head, *rows, "", "## Files", "", *files, "", _TAIL])


def _row(recipe: Recipe, environ: Mapping[str, str]) -> Iterator[str]:
    """The line of the table, of a recipe for a Neuron device."""
    instance = machines.known(recipe.instance)
    if instance is None:
        return
    found = all_as_json(recipe.checked(environ))
    plan, option = found["plan"], {name: each["value"] for name, each in found["options"].items()}
    (copies,) = recipe.checked(environ, replicas="max").placed
    loaders = [plan["loader"]]
    if option["model_loader"] == "auto":
        others = NEURON_BACKENDS.keys() - loaders
        loaders += [one for one in others if recipe.checked(environ, model_loader=one).ok]
    memory, unit = plan["memory_per_core"], machines.GIB
    cells = (
        recipe.path.stem,
        instance.name,
        ", ".join(loaders),
        option["tensor_parallel_degree"],
        len(copies),
        option["max_rolling_batch_size"],
        option["n_positions"],
        f"{memory['needed_bytes'] / unit:.1f} of {memory['capacity_bytes'] / unit:.0f}",
        f"{plan['host_bytes'] / unit:.0f} of {instance.host_memory_gib}",
        math.ceil(plan["estimated_compile_s"] / 60),
    )
    yield f"| {' | '.join(map(str, cells))} |"


def _described(recipe: Recipe) -> Iterator[str]:
    """The item of the list of files."""
    ids = join_words([f"`{model_id}`" for model_id in (recipe.model_id, *recipe.others)])
    text = re.sub(r" ?Also for .+?\.(?= |$)", "", recipe.comment)
    name = f"[{recipe.path.name}](../configs/{recipe.path.name})"
    yield from textwrap.wrap(
        f"- {name}: {ids}. {text}",
        120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
