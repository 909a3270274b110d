"""The Helm chart: valid for Kubernetes, and what it renders is what the package and the real server take.

`make chart` builds helm and installs kubernetes-validate; without them these tests are skipped.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from djl_python_neuronx import cli
from djl_python_neuronx.artifacts.manifest import unfinished
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.options import NAMES, option
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.config.server_options import ServerOptions
from djl_python_neuronx.config.sources import API_KEYS, LOG_FORMAT, parse_properties
from djl_python_neuronx.config.values import jsonable
from djl_python_neuronx.loading.check import check_all
from djl_python_neuronx.planning.machines import FAMILIES, GIB, INSTANCES, listed_cores, named
from djl_python_neuronx.planning.memory import host_bytes
from djl_python_neuronx.server.process import END_S
from tests.doubles.s3_rig import KEYS
from tests.processes import held_port, wait_until

pytest_plugins = ["tests.doubles.s3_fixtures"]
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "djl-neuronx"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
MODELS = Path(__file__).parents[1] / "planning" / "models"
TINY = ROOT / "examples" / "tiny-llama"

KUBERNETES = ("1.30", "1.37")
"""The oldest version that the chart allows, and the newest whose schemas kubernetes-validate has."""
CUSTOM = {
    "NodePool": (
        "github.com/aws/karpenter-provider-aws@v1.12.0",
        "pkg/apis/crds/karpenter.sh_nodepools.yaml",
    ),
    "EC2NodeClass": (
        "github.com/aws/karpenter-provider-aws@v1.12.0",
        "pkg/apis/crds/karpenter.k8s.aws_ec2nodeclasses.yaml",
    ),
    "ScaledObject": (
        "github.com/kedacore/keda/v2@v2.21.0",
        "config/crd/bases/keda.sh_scaledobjects.yaml",
    ),
    "PodMonitor": (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    "InferencePool": (
        "sigs.k8s.io/gateway-api-inference-extension@v1.5.0",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
}
"""Kinds of custom resources, to the Go module with their definition and its file."""
MODEL_OF = {
    "llama-3-8b": "llama-3-8b",
    "llama-3.2-3b": "llama-3.2-3b",
    "llama-2-13b": "llama-2-13b",
    "mistral-7b": "mistral-7b-v0.1",
    "tinyllama": "tinyllama-1.1b",
}
"""The examples' models, to their configurations in tests/planning/models."""
LOAD_BYTES_PER_S = 125e6
"""Weights from S3 to disk: the throughput of an EBS volume gp3 by default (AWS, "General purpose SSD volumes")."""

TOOLS = os.environ.get("CHART_TOOLS")
"""The folder that `make chart` fills, where nothing may be missing."""


def program(name: str) -> str:
    path = shutil.which(name, path=f"{TOOLS}/bin" if TOOLS else None)
    if path is None and not TOOLS:
        pytest.skip(f"there is no {name}; `make chart` brings it")
    assert path, f"make chart has not made {name}"
    return path


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("helm"), *arguments], capture_output=True, text=True, check=False
    )


@functools.cache
def rendered(example: str, *settings: str) -> Sequence[dict[str, Any]]:
    """The manifests of an example as `helm template` writes them, with further `--set` or `--set-json`."""
    ran = template(EXAMPLES[example], *settings)
    assert ran.returncode == 0, ran.stderr
    return [one for one in yaml.safe_load_all(ran.stdout) if one]


def template(
    values: Path, *settings: str, release: str = "llm", by: str = "--set-json"
) -> subprocess.CompletedProcess[str]:
    more = [word for setting in settings for word in (by, setting)]
    version = ("--kube-version", KUBERNETES[0])
    return helm(
        "template", release, str(CHART), "-n", "serving", *version, "-f", str(values), *more
    )


def only(manifests: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [
        one for one in manifests if one["kind"] == kind and "helm.sh/hook" not in annotations(one)
    ]
    assert len(found) == 1, (kind, found)
    return found[0]


def annotations(manifest: dict[str, Any]) -> dict[str, str]:
    return manifest["metadata"].get("annotations", {})


def pod(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return only(manifests, "Deployment")["spec"]["template"]["spec"]


def server(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod(manifests)["containers"]
    return container


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


POOL = ('inferencePool={"enabled": true, "picker": {"name": "picker"}}',)


def every() -> Iterator[tuple[str, Sequence[dict[str, Any]]]]:
    """The examples, and what they leave out: an InferencePool, node labels, a digest."""
    for name in EXAMPLES:
        yield name, rendered(name)
    yield "inf2-xlarge with a pool", rendered("inf2-xlarge", *POOL)
    digest = f'image.digest="sha256:{"0" * 64}"'
    others = (
        'nodeSelector={"zone": "a"}',
        "supplementalGroups=[500]",
        digest,
    )
    secrets = 'secrets={"hubToken": {"name": "hub", "key": "token"}}'
    yield "scale-to-zero with more", rendered("scale-to-zero", *others, secrets, "surge=1")


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_lint(example):
    ran = helm(
        "lint",
        "--strict",
        "--kube-version",
        KUBERNETES[0],
        str(CHART),
        "-f",
        str(EXAMPLES[example]),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_kubernetes_takes_the_manifests(tmp_path):
    validate = program("kubernetes-validate")
    files = []
    for name, manifests in every():
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump_all(m for m in manifests if m["kind"] not in CUSTOM))
    for version in KUBERNETES:
        ran = subprocess.run(
            [validate, "--strict", "-k", version, *files],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = (ran.stdout + ran.stderr).splitlines()
        assert ran.returncode == 0, lines
        assert [line for line in lines if "passed" not in line] == []
        assert len(lines) >= len(files) * 8


def test_the_definitions_of_custom_resources_take_them():
    schemas = definitions()
    seen = set()
    for name, manifests in every():
        for manifest in (one for one in manifests if one["kind"] in CUSTOM):
            version = manifest["apiVersion"].partition("/")[2]
            faults = [*schemas[manifest["kind"], version].iter_errors(manifest)]
            assert not faults, (name, manifest["kind"], faults)
            seen.add(manifest["kind"])
    assert seen == set(CUSTOM)


def definitions() -> dict[tuple[str, str], jsonschema.Draft7Validator]:
    """Kind and version to its schema, of the Go modules that publish it; unknown fields are errors."""
    if not TOOLS:
        pytest.skip(
            "`make chart` fetches the definitions of custom resources, by Go's module proxy"
        )
    modules = sorted({module for module, _ in CUSTOM.values()})
    # A module may ask for a newer Go; none is built here.
    environ = {**os.environ, "GOTOOLCHAIN": "local"}
    ran = subprocess.run(
        ["go", "mod", "download", "-json", *modules],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    text, folders, at = ran.stdout, {}, 0
    while text[at:].strip():
        found, end = json.JSONDecoder().raw_decode(text[at:].lstrip())
        at += len(text[at:]) - len(text[at:].lstrip()) + end
        folders[f"{found['Path']}@{found['Version']}"] = found.get("Dir", found.get("Error"))
    schemas = {}
    for kind, (module, file) in CUSTOM.items():
        spec = yaml.safe_load((Path(folders[module]) / file).read_text())["spec"]
        assert spec["names"]["kind"] == kind
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            schemas[kind, version["name"]] = jsonschema.Draft7Validator(schema)
    return schemas


def strict(schema: Any) -> Any:
    """A schema of Kubernetes as JSON Schema; fields that it does not name are errors, as the API server prunes them."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        made.pop("type", None)
    if (
        schema.get("type") == "object"
        and "properties" in schema
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        made.setdefault("additionalProperties", False)
    return made


def test_the_table_of_instances_is_the_packages():
    table = yaml.safe_load((CHART / "instances.yaml").read_text())
    assert table == {
        one.name: {
            "devices": one.devices,
            "coresPerDevice": FAMILIES[one.family].cores_per_device,
            "vcpus": one.vcpus,
            "memoryGi": one.host_memory_gib,
        }
        for one in INSTANCES.values()
    }
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["instanceType"]["enum"] == [*INSTANCES]


def test_options_that_the_chart_reads_have_one_name_and_one_place():
    """Aliases, and options of models on the server's command line, would go past the devices that the chart counts."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    options = schema["models"]["additionalProperties"]["properties"]["options"]["properties"]
    refused = {name for name, value in options.items() if value is False}
    read = {NAMES[name] for name in options}
    assert {name for name in NAMES if NAMES[name] in read and NAMES[name] != name} <= refused
    variables = {name for counted in read for name in option(counted).env}
    pattern = schema["env"]["propertyNames"]["not"]["pattern"].removeprefix("(?i)")
    assert {name for name in variables if not re.search(pattern, name)} == set()
    of_server = schema["serverOptions"]["propertyNames"]["enum"]
    assert {*of_server} | refused & ServerOptions.model_fields.keys() == {
        *ServerOptions.model_fields
    }


def numbers(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, int]]:
    """The numbers of nested values, by their paths."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield path + name, value


def test_numbers_of_set_are_those_of_a_file():
    """Templates have the first as int64, and the second as float64; the largest is printed without an exponent."""
    example = EXAMPLES["inf2-48xlarge"]
    expected = template(example).stdout
    found = [*numbers(yaml.safe_load((CHART / "values.yaml").read_text()))]
    found += numbers(yaml.safe_load(example.read_text()))
    assert {"compile.seconds", "models.tinyllama.options.replicas"} <= dict(found).keys()
    for path, value in dict(found).items():
        ran = template(example, f"{path}={value}", by="--set")
        assert (ran.stdout, ran.stderr) == (expected, ""), path
    schema = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    largest = schema["number"]["maximum"]
    assert largest == schema["count"]["maximum"]
    times = ("coreWait", "load", "compile", "endpoints", "drain")
    settings = (f"compile.seconds={largest}", *(f"seconds.{name}={largest}" for name in times))
    ran = template(example, *settings)
    assert "activeDeadlineSeconds: 999999\n" in ran.stdout
    assert "e+" not in ran.stdout


def settings(manifests: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The text of each model's file in the pod."""
    return {
        name.removesuffix(".properties"): text
        for name, text in only(manifests, "ConfigMap")["data"].items()
    }


def amounts(container: dict[str, Any]) -> dict[str, int]:
    """The devices that a container gets, and asks for with the same number."""
    resources = container["resources"]
    found = {name: n for name, n in resources["limits"].items() if name.startswith("aws.")}
    assert found.items() <= resources["requests"].items()
    return found


def cores(container: dict[str, Any], instance: str) -> int:
    """The NeuronCores of a container's devices."""
    ((name, number),) = amounts(container).items()
    each = {"aws.amazon.com/neuron": FAMILIES[INSTANCES[instance].family].cores_per_device}
    return number * each.get(name, 1)


def checked(example: str, text: dict[str, str], folder: Path, **environ: str) -> Any:
    """The plan of the pod's models on the example's instance type, as `check` makes it before a start.

    What they were compiled from takes the place of the compiled models, which are nowhere here.
    """
    files = []
    for name, one in text.items():
        model = folder / f"{name} model"
        model.mkdir(exist_ok=True)
        shutil.copy(MODELS / f"{MODEL_OF[name]}.json", model / "config.json")
        files.append(folder / f"{name}.properties")
        files[-1].write_text(re.sub("(?m)^option.model_id=.*$", f"option.model_id={model}", one))
    instance = yaml.safe_load(EXAMPLES[example].read_text())["instanceType"]
    return check_all([*map(str, files)], environ=environ, overrides={}, machine=named(instance))


@pytest.mark.parametrize("example", EXAMPLES)
class TestExample:
    def test_the_models_fit_the_devices(self, example, tmp_path):
        """Cores are degree times copies; `check` knows each option and places the copies on just these cores."""
        values = yaml.safe_load(EXAMPLES[example].read_text())
        needed = sum(
            model["options"]["tensor_parallel_degree"] * model["options"].get("replicas", 1)
            for model in values["models"].values()
        )
        for resource in ("neuron", "neuroncore"):
            container = server(rendered(example, f'resource="{resource}"'))
            assert cores(container, values["instanceType"]) == needed
        placement = checked(
            example, settings(rendered(example)), tmp_path, NEURON_RT_NUM_CORES=str(needed)
        )
        faults = [
            *placement.findings.errors,
            *(report.findings.errors for report in placement.reports),
        ]
        assert placement.ok, faults
        placed = [
            one for copies in placement.placed for copy in copies for one in listed_cores(copy)
        ]
        if placed:
            assert sorted(placed) == [*range(needed)]

    def test_the_times_suffice(self, example, tmp_path):
        """Of the start, the compile Job and the end of a pod."""
        manifests = rendered(example)
        placement = checked(example, settings(manifests), tmp_path)
        plans = {
            name: report.prepared.planned
            for name, report in zip(settings(manifests), placement.reports, strict=True)
        }
        weights = sum(
            plan.memory.weights * report.prepared.case.degree
            for plan, report in zip(plans.values(), placement.reports, strict=True)
        )
        waits = {resolved(report)["core_wait_s"] for report in placement.reports}
        assert (
            seconds(server(manifests)["startupProbe"])
            >= max(waits) + 2 * weights / LOAD_BYTES_PER_S
        )
        for job in (one for one in manifests if one["kind"] == "Job"):
            name = job["metadata"]["name"].removeprefix("llm-compile-")
            plan = plans[next(one for one in plans if one.replace(".", "-") == name)]
            assert job["spec"]["activeDeadlineSeconds"] > plan.estimated_compile_s > 0
        # Without a Job, and with time for it, a start compiles: the probe waits for that too.
        compile_s = int(sum(plan.estimated_compile_s for plan in plans.values()))
        longer = rendered(example, f"seconds.compile={compile_s}")
        more = seconds(server(longer)["startupProbe"]) - seconds(server(manifests)["startupProbe"])
        assert more >= compile_s - server(longer)["startupProbe"]["periodSeconds"]
        for text, compiles in ((settings(manifests), False), (settings(longer), True)):
            assert all(
                ("option.compilation=forbid" not in one) == compiles for one in text.values()
            )

        for name in ("coreWait", "load"):
            later = rendered(example, f"seconds.{name}=9000")
            assert seconds(server(later)["startupProbe"]) > 9000
        both = rendered(example, "seconds.coreWait=9000", "seconds.load=9000")
        assert seconds(server(both)["startupProbe"]) >= 18000

        longer = rendered(example, "seconds.drain=300", "seconds.endpoints=30")
        assert cli._parser().parse_args(server(longer)["args"]).drain == 300
        for end in (manifests, longer):
            drain = cli._parser().parse_args(server(end)["args"]).drain
            wait = server(end)["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert pod(end)["terminationGracePeriodSeconds"] > wait + drain + END_S

    def test_the_memory_suffices(self, example, tmp_path):
        """Of the pod for any load, which waits for the others; of the Job for one compiler at once, at least."""
        manifests = rendered(example)
        placement = checked(example, settings(manifests), tmp_path)
        machine = INSTANCES[yaml.safe_load(EXAMPLES[example].read_text())["instanceType"]]
        size = bytes_of(server(manifests)["resources"]["limits"]["memory"])
        assert size < machine.host_memory_gib * GIB
        assert server(manifests)["resources"]["requests"]["cpu"] < machine.vcpus
        disk = bytes_of(server(manifests)["resources"]["requests"]["ephemeral-storage"])
        compiled = [report.prepared for report in placement.reports]
        for one in compiled:
            assert size > host_bytes(one.case, "ranks", "bfloat16")
        assert disk > sum(one.planned.memory.weights * one.case.degree for one in compiled)
        for job in (one for one in manifests if one["kind"] == "Job"):
            (container,) = job["spec"]["template"]["spec"]["containers"]
            limit = bytes_of(container["resources"]["limits"]["memory"])
            assert limit > max(one.compile_memory.least for one in compiled)

    def test_the_pod_has_no_rights(self, example):
        manifests = rendered(example)
        for one in manifests:
            if one["kind"] in {"Deployment", "Job"}:
                spec = one["spec"]["template"]["spec"]
                assert spec["automountServiceAccountToken"] is False
                assert spec["securityContext"]["runAsNonRoot"] is True
                assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
                (container,) = spec["containers"]
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                mounts = {
                    mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]
                }
                assert not mounts.pop("/tmp")
                writes = one["kind"] == "Job"
                assert all(mounts[path] for path in mounts if not (writes and path == "/models"))
                dockerfile = (ROOT / "docker" / "Dockerfile.nxdi").read_text()
                assert f"USER {spec['securityContext']['runAsUser']}:" in dockerfile

    def test_everything_names_the_pods(self, example):
        manifests = rendered(example)
        template_labels = only(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
        for one in manifests:
            selector = (
                one["spec"].get("selector", one["spec"].get("podSelector", {}))
                if "spec" in one
                else {}
            )
            assert selector.get("matchLabels", selector).items() <= template_labels.items()
            if one["kind"] == "Job":
                labels = one["spec"]["template"]["metadata"]["labels"]
                assert (
                    labels["app.kubernetes.io/component"]
                    != template_labels["app.kubernetes.io/component"]
                )
            target = one["spec"].get("scaleTargetRef") if "spec" in one else None
            assert (
                target is None
                or target["name"] == only(manifests, "Deployment")["metadata"]["name"]
            )
        named_ports = {port["name"] for port in server(manifests)["ports"]}
        policy = only(manifests, "NetworkPolicy")["spec"]["ingress"]
        assert {port["port"] for rule in policy for port in rule["ports"]} == named_ports
        assert only(manifests, "Service")["spec"]["ports"][0]["targetPort"] in named_ports


def test_memory_and_cpus_follow_the_share_of_devices():
    """As many pods as the devices allow fit on the host, which keeps a twentieth; a given value stays."""
    for instance, degree, pods in (
        ("inf2.xlarge", 2, 1),
        ("inf2.8xlarge", 2, 1),
        ("inf2.48xlarge", 24, 1),
        ("inf2.48xlarge", 2, 12),
        ("trn1.32xlarge", 8, 4),
        ("trn2.48xlarge", 64, 1),
    ):
        options = {"tensor_parallel_degree": degree}
        given = (
            f"models={json.dumps({'tinyllama': {'model': 'a/b', 'options': options}})}",
            f'instanceType="{instance}"',
            'schedulerName="my-scheduler"',
        )
        host = INSTANCES[instance]
        for resource in ("neuron", "neuroncore"):
            resources = server(rendered("inf2-xlarge", *given, f'resource="{resource}"'))[
                "resources"
            ]
            taken = bytes_of(resources["limits"]["memory"]) / GIB * pods
            assert resources["requests"]["memory"] == resources["limits"]["memory"]
            assert 0.8 * host.host_memory_gib < taken < 0.96 * host.host_memory_gib, (
                instance,
                taken,
            )
            assert 0.7 * host.vcpus < resources["requests"]["cpu"] * pods < 0.96 * host.vcpus
        chosen = server(rendered("inf2-xlarge", *given, 'memory="9Gi"', "cpu=2"))["resources"]
        assert (chosen["limits"]["memory"], chosen["requests"]["cpu"]) == ("9Gi", 2)


def test_a_part_of_a_device_is_a_whole_one():
    for instance, degree, copies, devices in (
        ("inf2.xlarge", 1, 1, 1),
        ("inf2.48xlarge", 1, 23, 12),
        ("trn1.32xlarge", 2, 4, 4),
        ("trn2.48xlarge", 2, 3, 2),
        ("trn2.48xlarge", 64, 1, 16),
    ):
        options = {"tensor_parallel_degree": degree, "replicas": copies}
        given = (
            f"models={json.dumps({'tinyllama': {'model': 'a/b', 'options': options}})}",
            f'instanceType="{instance}"',
            'schedulerName="my-scheduler"',
        )
        container = server(rendered("scale-to-zero", *given))
        assert amounts(container) == {"aws.amazon.com/neuron": devices}
        container = server(rendered("scale-to-zero", *given, 'resource="neuroncore"'))
        assert amounts(container) == {"aws.amazon.com/neuroncore": degree * copies}


def test_the_compile_hook_has_what_it_needs_before_the_release_exists():
    hooks = [one for one in rendered("inf2-48xlarge") if "helm.sh/hook" in annotations(one)]
    weights: dict[str, set[int]] = {}
    for one in hooks:
        assert annotations(one)["helm.sh/hook"] == "pre-install,pre-upgrade"
        weights.setdefault(one["kind"], set()).add(
            int(annotations(one).get("helm.sh/hook-weight", 0))
        )
    assert max(weights["ServiceAccount"] | weights["ConfigMap"]) < min(weights["Job"])
    names = {
        kind: {one["metadata"]["name"] for one in hooks if one["kind"] == kind} for kind in weights
    }
    jobs = [one["spec"]["template"]["spec"] for one in hooks if one["kind"] == "Job"]
    assert len(jobs) == len(names["Job"]) == 4
    # With OnFailure the pod, and its log with the reason, is removed when the Job has failed.
    assert {job["restartPolicy"] for job in jobs} == {"Never"}
    assert {one["spec"]["backoffLimit"] for one in hooks if one["kind"] == "Job"} == {0}
    assert {job["serviceAccountName"] for job in jobs} == names["ServiceAccount"]
    volumes = {
        volume["configMap"]["name"]
        for job in jobs
        for volume in job["volumes"]
        if "configMap" in volume
    }
    assert volumes == names["ConfigMap"]
    assert not any(amounts(job["containers"][0]) for job in jobs)


def test_custom_resources_fit_the_pods():
    manifests = rendered("scale-to-zero", 'nodeSelector={"zone": "a"}')
    spec = only(manifests, "Deployment")["spec"]
    assert "replicas" not in spec  # else each upgrade would undo the scaling
    (nodes,) = (only(manifests, "NodePool")["spec"]["template"]["spec"],)
    offered = {one["key"]: one["values"] for one in nodes["requirements"]}
    selector = spec["template"]["spec"]["nodeSelector"]
    assert all(offered[key] == [value] for key, value in selector.items())
    tolerated = {(one["key"], one["effect"]) for one in spec["template"]["spec"]["tolerations"]}
    assert {(taint["key"], taint["effect"]) for taint in nodes["taints"]} <= tolerated
    assert nodes["nodeClassRef"]["name"] == only(manifests, "EC2NodeClass")["metadata"]["name"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    most = only(manifests, "NodePool")["spec"]["limits"]
    assert most == {"aws.amazon.com/neuron": values["karpenter"]["maxNodes"]}

    scaled = only(manifests, "ScaledObject")["spec"]
    assert scaled["minReplicaCount"] == 0
    queries = [one["metadata"]["query"] for one in scaled["triggers"]]
    ours = [query for query in queries if METRIC.search(query)]
    assert (len(ours), len(queries)) == (2, 3)  # without a pod none of ours exists
    for query in ours:
        (pattern,) = re.findall('pod=~"([^"]+)"', query)
        assert re.fullmatch(pattern, "llm-7d4b9c6f5d-x2x8k")
        assert not re.fullmatch(pattern, "llm-compile-tinyllama-x2x8k")
        assert 'namespace="serving"' in query
    (text,) = settings(manifests).values()
    assert int(re.search("core_wait_s=(.*)", text)[1]) > values["seconds"]["coreWait"]

    pool = only(rendered("inf2-xlarge", *POOL), "InferencePool")["spec"]
    container = server(rendered("inf2-xlarge", *POOL))
    assert pool["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]
    assert not any(
        "admin_port" in one for one in container["args"]
    )  # the picker reads metrics there
    matched = pool["selector"]["matchLabels"]
    template_labels = only(rendered("inf2-xlarge", *POOL), "Deployment")["spec"]["template"][
        "metadata"
    ]["labels"]
    assert matched.items() <= template_labels.items()


def test_the_page_names_what_the_chart_has():
    page = (ROOT / "docs" / "eks.md").read_text()
    scaler = only(rendered("inf2-48xlarge"), "HorizontalPodAutoscaler")["spec"]
    names = [one["pods"]["metric"]["name"] for one in scaler["metrics"]]
    (rule,) = (
        block
        for block in re.findall("```yaml\n(.*?)```", page, re.DOTALL)
        if "seriesQuery" in block
    )
    (custom,) = yaml.safe_load(rule)["rules"]["custom"]
    (pattern,) = re.findall('__name__=~"([^"]+)"', custom["seriesQuery"])
    assert all(re.fullmatch(pattern, name) for name in names)
    given = yaml.safe_load((CHART / "values.yaml").read_text())
    wait = given["seconds"]
    assert f"| {wait['coreWait']} + {wait['load']} + {wait['compile']} s |" in page
    assert f"| {wait['endpoints']} + {wait['drain']} + 10 s |" in page
    assert f"| {given['compile']['seconds']} s |" in page
    for name in re.findall(r"`([a-z]\w+(?:\.\w+)+)`", page):
        first, *rest = name.split(".")
        if first in given:
            assert functools.reduce(dict.__getitem__, rest, given[first]) is not None, name


def bytes_of(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) * GIB


def seconds(probe: dict[str, Any]) -> int:
    return probe["periodSeconds"] * probe["failureThreshold"]


def resolved(report: Any) -> dict[str, Any]:
    return report.resolved.options.model_dump()


PICKED = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
"""The names that the endpoint picker reads. Source: gateway-api-inference-extension 1.5, the defaults of its flags."""
METRIC = re.compile(r"\b(?:djl_neuronx|vllm)[_:]\w+")


@pytest.fixture
def programs(tmp_path) -> dict[str, str]:
    """Variables of a process that finds this package's command and the images' scripts."""
    command = tmp_path / "bin" / "djl-neuronx"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m djl_python_neuronx "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{ROOT / 'docker'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


def test_the_server_starts_as_the_pod_and_answers_its_probes(programs, tmp_path):
    """With the pod's arguments, settings and variables; for the simulated device, a copy of each model, other ports."""
    one_copy = [
        f"models.{name}.options.replicas=1" for name in ("llama-3-8b", "mistral-7b", "tinyllama")
    ]
    others = ("autoscaling.slotsInUse=30", "seconds.coreWait=300", 'schedulerName="my-scheduler"')
    manifests = rendered("inf2-48xlarge", *one_copy, *others)
    container = server(manifests)
    for name, text in settings(manifests).items():
        changed = re.sub("(?m)^option.model_id=.*$", f"option.model_id={TINY}", text)
        changed = re.sub("(?m)^option.n_positions=.*$", "option.n_positions=256", changed)
        (tmp_path / f"{name}.properties").write_text(changed)
    scalers = (
        only(manifests, "HorizontalPodAutoscaler"),
        only(rendered("scale-to-zero"), "ScaledObject"),
    )
    wanted = set(METRIC.findall("".join(map(json.dumps, scalers))))
    assert len(wanted) == 2
    with ExitStack() as stack:
        ports = {one["name"]: stack.enter_context(held_port()) for one in container["ports"]}
        arguments = [
            one.replace("/etc/djl-neuronx", str(tmp_path)).replace("=9000", f"={ports['metrics']}")
            for one in container["args"]
        ]
        environ = {
            **programs,
            **variables(container),
            **dict.fromkeys(secret_variables(container), "a-key,another"),
            "OPTION_MODEL_LOADER": "sim",
            "OPTION_SIM_STEP_MS": "1",
            "SAGEMAKER_BIND_TO_PORT": str(ports["http"]),
        }
        log = tmp_path / "log"
        process = subprocess.Popen(
            ["entrypoint.sh", *arguments],
            env=environ,
            stdout=stack.enter_context(log.open("w")),
            stderr=subprocess.STDOUT,
        )
        stack.callback(process.kill)

        def get(
            port: str, path: str, body: object = None, *, timeout: float = 30, **headers: str
        ) -> tuple[int, str]:
            assert process.poll() is None, log.read_text()
            data = None if body is None else json.dumps(body).encode()
            address = f"http://127.0.0.1:{ports[port]}{path}"
            try:
                request = urllib.request.Request(address, data, headers)
                with urllib.request.urlopen(request, timeout=timeout) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
            except OSError:
                return 0, ""

        startup, readiness, liveness = (
            container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")
        )
        wait_until(lambda: get(startup["port"], startup["path"])[0] == 200)
        assert get(readiness["port"], readiness["path"])[0] == 200
        assert get(liveness["port"], liveness["path"])[0] == 200
        process.send_signal(signal.SIGSTOP)
        assert get(liveness["port"], liveness["path"], timeout=1)[0] == 0
        process.send_signal(signal.SIGCONT)
        (endpoint,) = only(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
        status, metrics = get(endpoint["port"], endpoint.get("path", "/metrics"))
        assert status == 200
        assert wanted | PICKED <= {line.split("{")[0] for line in metrics.splitlines()}
        assert get("http", "/metrics", authorization="Bearer another")[0] == 404
        for name in settings(manifests):
            body = {"model": name, "prompt": "Hello", "max_tokens": 3}
            json_type = {"content-type": "application/json"}
            assert get("http", "/v1/completions", body, **json_type)[0] == 401
            status, answer = get(
                "http", "/v1/completions", body, authorization="Bearer another", **json_type
            )
            assert status == 200, answer
            assert json.loads(answer)["model"] == name
        process.terminate()
        assert process.wait(60) == 0
        lines = [json.loads(line).get("message", "") for line in log.read_text().splitlines()]
        waits = [line for line in lines if "core_wait_s" in line]
        assert waits
        assert all("300" in line for line in waits)


def secret_variables(container: dict[str, Any]) -> set[str]:
    return {one["name"] for one in container["env"] if "valueFrom" in one}


def test_the_variables_are_those_that_the_package_reads():
    secrets = (
        'secrets={"hubToken": {"name": "a", "key": "b"}, "apiKeys": {"name": "c", "key": "d"}}'
    )
    container = server(rendered("inf2-xlarge", secrets, "env={}"))
    assert secret_variables(container) == {API_KEYS, "HF_TOKEN"}
    assert cli._log_format(variables(container).pop(LOG_FORMAT)) == "json"
    assert variables(container).keys() == {LOG_FORMAT}


def test_the_compile_job_never_changes_an_output(programs, tmp_path, moto, bucket):
    """Its script, here with the cpu backend: it compiles where no output was finished, in S3 or on a volume."""
    manifests = rendered("inf2-xlarge")
    (job,) = (one for one in manifests if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (files,) = (one["data"] for one in manifests if one["kind"] == "ConfigMap" and annotations(one))
    given = yaml.safe_load(EXAMPLES["inf2-xlarge"].read_text())["models"]["llama-3.2-3b"]
    for name, place in (("compile", given["model"]), ("serve", given["compiled"])):
        assert f"option.model_id={place}\n" in f"{files[f'{name}.properties']}\n"
    assert container["args"][0] == given["compiled"]
    environ = {
        **programs,
        **variables(container),
        **KEYS,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{moto}",
        "AWS_MAX_ATTEMPTS": "1",
        "OPTION_MODEL_LOADER": "cpu",
    }
    python, script = container["command"]
    assert python == "python"
    for path in TINY.iterdir():
        bucket.put_object(Bucket="models", Key=f"source/{path.name}", Body=path.read_bytes())
    in_s3, folder = "s3://models/tiny", str(tmp_path / "tiny")

    def job_ends(
        output: str = in_s3, model: str = "s3://models/source", extra: str = "", **more: str
    ) -> tuple[int, str]:
        """The status and output of the Job."""
        for name, text in files.items():
            source = model if name == "compile.properties" else output
            changed = re.sub("(?m)^option.model_id=.*$", f"option.model_id={source}", text)
            changed = changed.replace("n_positions=4096", "n_positions=256")
            (tmp_path / name).write_text(changed + extra if "properties" in name else changed)
        ran = subprocess.run(
            [sys.executable, tmp_path / Path(script).name, output, container["args"][1]],
            env={**environ, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.returncode, ran.stdout + ran.stderr

    def manifest() -> bytes:
        return bucket.get_object(Bucket="models", Key="tiny/manifest.json")["Body"].read()

    for output in (in_s3, folder):
        for compiles in (True, False):
            status, text = job_ends(output)
            assert status == 0, text
            assert ("nothing to compile" not in text) == compiles
    whole = manifest()
    with held_port() as closed:
        for change, message in (
            ({"model": str(TINY)}, "compiled from another model.*name another folder"),
            ({"extra": "\noption.revision=v2"}, "compiled from another model.*name another folder"),
            ({"extra": "\noption.n_position=9"}, "n_position.*cannot be served, see"),
            ({"AWS_ENDPOINT_URL": f"http://127.0.0.1:{closed}"}, "s3://models/tiny"),
        ):
            status, text = job_ends(**change)
            assert status != 0, text
            assert re.search(message, text, re.DOTALL), text
            assert manifest() == whole
    # What an upload leaves that was killed, which no pod has ever read.
    files_of = json.loads(whole)["files"]
    killed = json.dumps(unfinished(files_of)).encode()
    bucket.put_object(Bucket="models", Key="tiny/manifest.json", Body=killed)
    status, text = job_ends()
    assert status == 0, text
    assert json.loads(manifest())["files"].keys() == files_of.keys()
    bucket.delete_object(Bucket="models", Key="tiny/manifest.json")
    status, text = job_ends()
    assert status != 0, "a model that is no output of this package would be replaced"
    assert in_s3 in text


def test_another_model_replaces_the_pods():
    pods = [
        only(manifests, "Deployment")["spec"]["template"]
        for manifests in (
            rendered("inf2-xlarge"),
            rendered("inf2-xlarge", 'models.llama-3\\.2-3b.model="s3://b/other"'),
        )
    ]
    assert pods[0] != pods[1]


BASE = EXAMPLES["inf2-xlarge"] if EXAMPLES else None
MODEL = '{"model": "s3://b/m", "options": {"tensor_parallel_degree": 2%s}}'
REFUSED = {
    "a typo at the top": ("instancetype=1", "instancetype"),
    "a typo in a model": (
        'models={"a": {"modle": "s3://b/m", "options": {"tensor_parallel_degree": 1}}}',
        "modle",
    ),
    "no model": ("models={}", "models"),
    "no degree": ('models={"a": {"model": "s3://b/m", "options": {}}}', "tensor_parallel_degree"),
    "the largest degree": (
        'models.llama-3\\.2-3b.options.tensor_parallel_degree="max"',
        "tensor_parallel_degree",
    ),
    "as many copies as fit": ('models.llama-3\\.2-3b.options.replicas="max"', "replicas"),
    "no place of a model": ('models.llama-3\\.2-3b.model="llama"', "model"),
    "a compiled model on the hub": ('models.llama-3\\.2-3b.compiled="a/b"', "compiled"),
    "a name with capitals": (f'models={{"Llama": {MODEL % ""}}}', "Llama"),
    "an option with the prefix": (
        'models.llama-3\\.2-3b.options={"tensor_parallel_degree": 1, "option.dtype": "bf16"}',
        "option.dtype",
    ),
    "the model as an option": ('models.llama-3\\.2-3b.options.model_id="s3://b/m"', "model_id"),
    "the wait as an option": ("models.llama-3\\.2-3b.options.core_wait_s=9", "core_wait_s"),
    "an option of two lines": (
        'models.llama-3\\.2-3b.options.chat_template="a\\nb"',
        "chat_template",
    ),
    "an unknown instance type": ('instanceType="inf2.2xlarge"', "instanceType"),
    "an unknown resource": ('resource="neurondevice"', "resource"),
    "an option among the variables": ('env={"OPTION_DTYPE": "bf16"}', "OPTION_DTYPE"),
    "a token among the variables": ('env={"HF_TOKEN": "hf_x"}', "HF_TOKEN"),
    "AWS's keys among the variables": (
        'env={"AWS_SECRET_ACCESS_KEY": "x"}',
        "AWS_SECRET_ACCESS_KEY",
    ),
    "a key in place of a secret": ('secrets.apiKeys="k"', "apiKeys"),
    "a secret without its key": ('secrets.apiKeys={"name": "a"}', "key"),
    "the port of metrics": ("serverOptions.admin_port=9001", "admin_port"),
    "an option of models for the server": (
        "serverOptions.tensor_parallel_degree=8",
        "tensor_parallel_degree",
    ),
    "the port of metrics as an option of a model": (
        "models.llama-3\\.2-3b.options.admin_port=9001",
        "admin_port",
    ),
    "an option by its other name": ("models.llama-3\\.2-3b.options.pp_degree=2", "pp_degree"),
    "copies among the variables": (
        'env={"SAGEMAKER_NUM_MODEL_WORKERS": "2"}',
        "SAGEMAKER_NUM_MODEL_WORKERS",
    ),
    "an argument of DJL Serving": ('env={"ARGS_REPLICAS": "2"}', "ARGS_REPLICAS"),
    "a degree among the variables": (
        'env={"PIPELINE_PARALLEL_DEGREE": "2"}',
        "PIPELINE_PARALLEL_DEGREE",
    ),
    "a compile of weeks": ("compile.seconds=1000000", "seconds"),
    "a tag in the repository": ('image.repository="r/djl:nxdi"', "repository"),
    "no wait for endpoints": ("seconds.endpoints=0", "endpoints"),
    "a load of no time": ("seconds.load=0", "load"),
    "memory as a number": ("memory=14", "memory"),
    "no replica": ("replicas=0", "replicas"),
    "an unknown scaler": ('autoscaling.by="vpa"', "by"),
    "a policy for everybody by accident": ("networkPolicy.clients=[]", "clients"),
    "a pool of nodes without a role": ("karpenter.enabled=true", "role"),
    "a pool without a picker": ("inferencePool.enabled=true", "name"),
    "no image": ('image.repository=""', "repository"),
    "a claim of two fields": ('modelsClaim="a}\\n          hostPath: {path: /"', "modelsClaim"),
    "a scheduler of two lines": ('schedulerName="a\\nhostNetwork: true"', "schedulerName"),
    "a secret with a brace": ('secrets.apiKeys={"name": "a}", "key": "b"}', "name"),
    "a key with a brace": ('secrets.apiKeys={"name": "a", "key": "b}"}', "key"),
    "an image of two lines": ('image.repository="a\\nb"', "repository"),
    "a role of two lines": ('karpenter.role="a\\nb"', "role"),
    "a tag of two lines": ('karpenter.discovery="a\\nb"', "discovery"),
    "an AMI with a brace": ('karpenter.image="al2023@latest}"', "image"),
    "a picker of two lines": ('inferencePool.picker.name="a\\nb"', "name"),
    "Prometheus of two lines": ('autoscaling.prometheus="http://a\\nb"', "prometheus"),
    "longer than an HPA may wait": ("autoscaling.cooldownSeconds=3601", "cooldownSeconds"),
    "half a digest": ('image.digest="sha256:1"', "digest"),
}
"""Settings that the schema refuses, to the name in its message."""
CONTRADICTIONS = {
    (
        """models.llama-3-2-3b={"model": "a/b", "compiled": "s3://b/c", "options": {"tensor_parallel_degree": 2}}""",
        'instanceType="inf2.24xlarge"',
        'schedulerName="my-scheduler"',
    ): "two models have the Job llm-compile-llama-3-2-3b",
    (
        "models.llama-3\\.2-3b.options.replicas=2",
    ): "take 4 NeuronCores .*llama-3.2-3b: 2 x 2.* inf2.xlarge has 2: lower",
    ("models.llama-3\\.2-3b.options.draft_model_tp_size=4",): "take 4 NeuronCores",
    ("models.llama-3\\.2-3b.options.pipeline_parallel_degree=2",): "take 4 NeuronCores",
    (
        'instanceType="inf2.24xlarge"',
        'resource="neuroncore"',
    ): "2 of the 12 aws.amazon.com/neuroncore of .*set schedulerName",
    (
        'instanceType="inf2.24xlarge"',
        "models.llama-3\\.2-3b.options.replicas=2",
    ): "2 of the 6 aws.amazon.com/neuron of .*set schedulerName",
    (
        'instanceType="trn1.32xlarge"',
        "models.llama-3\\.2-3b.options.replicas=3",
    ): "3 of the 16 .*1, 4, 8 or all",
    ('autoscaling={"by": "hpa", "minReplicas": 0}',): "an HPA keeps one pod",
    ('autoscaling={"by": "keda", "minReplicas": 0}',): "set autoscaling.wake.query",
    ('autoscaling={"by": "keda", "minReplicas": 5}',): "above autoscaling.maxReplicas",
    (*POOL, 'secrets={"apiKeys": {"name": "a", "key": "b"}}'): "without a key",
    (
        *POOL,
        f"models.b={MODEL % ''}",
        'instanceType="inf2.24xlarge"',
        'schedulerName="my-scheduler"',
    ): "one series",
    ('models.llama-3\\.2-3b.model="/models/a"',): "set modelsClaim",
    (
        f"models.b={MODEL % ''}",
        'models.b.compiled="s3://my-models/llama-3.2-3b-inf2-sdk2.31/"',
        'instanceType="inf2.24xlarge"',
        'schedulerName="my-scheduler"',
    ): "compiled is that of another model",
    (
        'models.llama-3\\.2-3b.compiled="s3://my-models/llama-3.2-3b/"',
    ): "models.llama-3.2-3b.compiled is its model",
    ('nodeSelector={"node.kubernetes.io/instance-type": "inf2.xlarge"}',): "set instanceType",
    (
        'karpenter={"enabled": true, "role": "r", "discovery": "d"}',
        'nodeSelector={"karpenter.sh/capacity-type": "spot"}',
    ): "set karpenter.capacityType",
    ("cpu=4",): "inf2.xlarge has 4 CPUs and 16Gi",
    ('memory="16Gi"',): "inf2.xlarge has 4 CPUs and 16Gi",
    ('autoscaling={"by": "hpa", "slotsInUse": 9}',): "is 9, and a pod has at most 8 slots",
}
"""Settings that contradict each other, to the message."""


def test_bad_values_are_refused():
    wrong = []
    for what, (setting, name) in REFUSED.items():
        ran = template(BASE, setting)
        if ran.returncode == 0 or "schema" not in ran.stderr or name not in ran.stderr:
            wrong.append((what, ran.returncode, ran.stderr))
    for several, message in CONTRADICTIONS.items():
        ran = template(BASE, *several)
        if ran.returncode == 0 or not re.search(message, ran.stderr):
            wrong.append((several, ran.returncode, ran.stderr))
    long = ("-n", "n" * 60, "--kube-version", KUBERNETES[0], "-f", str(EXAMPLES["scale-to-zero"]))
    ran = helm("template", "llm", str(CHART), *long)
    if ran.returncode == 0 or "NodePool" not in ran.stderr:
        wrong.append((long, ran.returncode, ran.stderr))
    for release in ("123", "1llm", "l.v1"):
        ran = template(BASE, release=release)
        if ran.returncode == 0 or f"name {release} is no name of a Service" not in ran.stderr:
            wrong.append((release, ran.returncode, ran.stderr))
    assert not wrong


def test_text_stays_text():
    """Words that YAML takes for numbers and truth values, as names; and what else a schema must let through."""
    words = (
        'modelsClaim="123"',
        'schedulerName="true"',
        'secrets={"apiKeys": {"name": "1e3", "key": "yes"}, "hubToken": {"name": "0", "key": "no"}}',
        'env={"y": "1", "TOKENIZERS_PARALLELISM": "false"}',
        'karpenter={"enabled": true, "role": "123", "discovery": "true"}',
    )
    ran = template(EXAMPLES["scale-to-zero"], *words, release="on")
    assert ran.returncode == 0, ran.stderr
    manifests = [one for one in yaml.safe_load_all(ran.stdout) if one]
    assert {type(one["metadata"]["name"]) for one in manifests} == {str}
    labels = "app.kubernetes.io/instance"
    assert {one["metadata"]["labels"][labels] for one in manifests} == {"on"}
    spec, container = pod(manifests), server(manifests)
    assert spec["schedulerName"] == "true"
    assert {"claimName": "123"} in [one.get("persistentVolumeClaim") for one in spec["volumes"]]
    assert variables(container).items() >= {"y": "1", "TOKENIZERS_PARALLELISM": "false"}.items()
    references = [
        one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one
    ]
    assert references == [{"name": "0", "key": "no"}, {"name": "1e3", "key": "yes"}]
    nodes = only(manifests, "EC2NodeClass")["spec"]
    assert nodes["role"] == "123"
    assert nodes["subnetSelectorTerms"] == [{"tags": {"karpenter.sh/discovery": "true"}}]


def expanded(text: str) -> str:
    """Text of an argument as a process gets it. Source: Kubernetes, "Define Dependent Environment Variables"."""
    return re.sub(r"\$(\$|\(\w+\))", lambda found: "$" if found[1] == "$" else "a secret", text)


def test_a_dollar_does_not_bring_in_a_secret():
    given = "$(HF_TOKEN) $$(HF_TOKEN) $a$"
    manifests = rendered(
        "inf2-xlarge",
        f"env={json.dumps({'A': given})}",
        f"serverOptions={json.dumps({'access_log': given})}",
        'models.llama-3\\.2-3b.compiled="s3://b/$(A)"',
    )
    (job,) = (one for one in manifests if one["kind"] == "Job")
    (compiler,) = job["spec"]["template"]["spec"]["containers"]
    assert expanded(compiler["args"][0]) == "s3://b/$(A)"
    assert expanded(server(manifests)["args"][-1]) == f"--option=access_log={given}"
    assert expanded(variables(server(manifests))["A"]) == given


def test_options_reach_the_server_as_they_are(tmp_path):
    """Text, numbers, lists and objects through values, the properties file and the package's reader of it."""
    given = {
        "tensor_parallel_degree": 2,
        "max_body_bytes": 62914560,
        "text_timeout": 2.5,
        "trust_remote_code": False,
        "context_length_estimate": [256, 4096],
        "chat_template_kwargs": {"a\\b": 'c"d', "deep": {"on": True}},
        "model_name": "a, b\\c",
    }
    manifests = rendered("inf2-xlarge", f"models.llama-3\\.2-3b.options={json.dumps(given)}")
    (text,) = settings(manifests).values()
    found = {s.name: s.value for s in parse_properties(text.encode(), "values")}
    for name, value in given.items():
        assert found[name] == value if isinstance(value, str) else json.loads(found[name]) == value
    problems = Problems()
    options = read_settings(
        None, tmp_path, {}, problems, content=text.encode(), file="values"
    ).options
    problems.raise_errors()
    of_server = {
        "access_log": "json",
        "cors_allow_origins": ["https://a.b"],
        "max_connections": 1000000,
    }
    manifests = rendered("inf2-xlarge", f"serverOptions={json.dumps(of_server)}")
    given_to_serve = dict(cli._parser().parse_args(server(manifests)["args"]).option)
    assert given_to_serve.keys() == {*of_server, "admin_port"}
    read = read_settings(None, tmp_path, {}, Problems(), {**given_to_serve, "model_id": str(TINY)})
    for name, value in of_server.items():
        assert jsonable(getattr(read.options, name)) == value
    assert options.chat_template_kwargs == given["chat_template_kwargs"]
    assert options.max_body_bytes == given["max_body_bytes"]
