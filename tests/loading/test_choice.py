"""The library of `model_loader=auto`, by the plans of both."""

import json
from itertools import product
from pathlib import Path

from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from tests.effort import some
from tests.loading.checking import TINY, folder, run

MODELS = [
    TINY / "config.json",
    *sorted((Path(__file__).parents[1] / "planning" / "models").glob("*.json")),
]
MACHINES = ("inf2.xlarge", "inf2.24xlarge", "inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge")
DEGREES = (None, "max", "8", "12", "24", "32")


def test_auto_refuses_nothing_that_a_library_serves(tmp_path):
    wrong, switched = [], 0
    for path in MODELS:
        target = folder(tmp_path, config=json.loads(path.read_text()))
        for machine, degree in some([*product(MACHINES, DEGREES)], MODELS.index(path)):
            options = {} if degree is None else {"tensor_parallel_degree": degree}
            where = f"{path.stem} on {machine} with tensor_parallel_degree={degree}"
            alone = {
                loader: run(target, machine=machine, model_loader=loader, **options)
                for loader in NEURON_BACKENDS
            }
            auto = run(target, machine=machine, **options)
            serving = [loader for loader, report in alone.items() if report.ok]
            if serving and (not auto.ok or auto.prepared.backend != serving[0]):
                wrong.append(f"{where}: auto takes {auto.prepared.backend}, {serving} serve")
            for loader in alone.keys() - serving if serving else ():
                errors = alone[loader].findings.messages("error")
                switched += 1
                if not any(f"model_loader={serving[0]}" in error for error in errors):
                    wrong.append(f"{where}: {errors} of {loader} do not name {serving[0]}")
    assert wrong == []
    assert switched > 30


def test_auto_takes_the_library_that_leaves_memory_for_a_length(tmp_path):
    """One core holds Llama 3.1 8B with the shortest sequences alone by NxD Inference, which keeps more of it there."""
    config = json.loads((MODELS[1].parent / "llama-3.1-8b.json").read_text())
    target, one = folder(tmp_path, config=config), {"tensor_parallel_degree": "1"}

    def planned(**options):
        report = run(target, machine="inf2.xlarge", **one, **options)
        assert report.findings.messages("error") == ()
        warnings = report.findings.messages("warning")
        short = [text for text in warnings if "room for no longer sequences" in text]
        length = report.prepared.options.n_positions
        return report.prepared.backend, length, len(short), report.findings.messages("note")

    by_tnx = planned(model_loader="tnx")
    backend, length, short, notes = planned()
    assert (backend, length, short) == by_tnx[:3] == ("tnx", 1024, 0)
    assert any("nxdi has memory for the shortest n_positions only" in note for note in notes)
    assert planned(n_positions="4096", max_rolling_batch_size="1")[:3] == ("tnx", 4096, 0)
    assert planned(model_loader="nxdi")[:3] == ("nxdi", 128, 1)
    assert planned(model_loader="nxdi", n_positions="128")[:3] == ("nxdi", 128, 0)


def test_max_is_the_largest_degree_that_the_library_takes_for_the_model(tmp_path):
    """Llama 2's vocabulary of 32,000 tokens is divided by 8 and not by 24."""
    config = json.loads((MODELS[1].parent / "llama-2-7b.json").read_text())
    target, wanted = folder(tmp_path, config=config), {"tensor_parallel_degree": "max"}
    for loader, degree in (("auto", 8), ("nxdi", 8), ("tnx", 24)):
        report = run(target, machine="inf2.48xlarge", model_loader=loader, **wanted)
        assert report.findings.messages("error") == ()
        assert report.prepared.case.degree == degree
        reasons = [
            note for note in report.findings.messages("note") if "not 24: NxD Inference" in note
        ]
        assert len(reasons) == (degree == 8)


def test_of_two_that_refuse_the_file_it_is_the_one_that_the_file_is_for(tmp_path):
    """The file's own mistake is named, and not that the other library lacks the option."""
    config = json.loads((MODELS[1].parent / "llama-2-7b.json").read_text())
    mistakes = {
        "speculative_length": "2048",
        "on_device_generation": "true",
        "shard_over_sequence": "true",
    }
    for name, value in mistakes.items():
        options = {"speculative_draft_model": str(TINY), "tensor_parallel_degree": "8", name: value}
        report = run(folder(tmp_path, config=config), machine="inf2.48xlarge", **options)
        errors = report.findings.messages("error")
        assert report.prepared.backend == "tnx"
        assert any(name in error for error in errors)
        assert not any("later version" in error for error in errors)
