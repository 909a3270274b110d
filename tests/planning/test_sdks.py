"""The table of SDKs against AWS's images, and the versions of machines whose package lists were published."""

from itertools import pairwise

import pytest

from djl_python_neuronx.planning import sdks
from djl_python_neuronx.planning.nxdi.versions import releases
from tests.doubles.recorded_machine import RecordedMachine

IMAGES = {
    # SDK: what AWS's image of it installs, in the order of NAMES. Source: aws-neuron/deep-learning-containers,
    # pytorch/inference/*/Dockerfile.neuronx at 4cee5fb, 1cc5c68, 0a7317b, 033cc6a, 7dafe55 and e22ca08.
    "2.21.1": "2.23.112.0-9b5179492 2.23.135.0-3e70920f2 2.20.204.0 2.16.372.0 2.5.1.2.4.0 0.10.1 0.1.1",
    "2.24.1": "2.26.42.0-2ff3b5c7d 2.26.43.0-47cc904ea 2.24.54.0 2.19.8089.0 2.7.0.2.8.6734+ac864f72 "
    "0.13.14393+b8569585 0.4.7422+9483d307",
    "2.25.0": "2.27.23.0-8deec4dbf 2.27.34.0-ec8cd5e8b 2.25.145.0 2.20.9961.0 2.7.0.2.9.9357+08e1f40d "
    "0.14.18461+9ac233f2 0.5.9230+dcf1e2da",
    "2.28.1": "2.30.51.0-faafe26f0 2.30.59.0-f5cdefb39 2.28.23.0-f1c114a9d 2.23.6484.0+3b612583 "
    "2.9.0.2.12.22436+0f1dac25 0.17.26814+4b18de63 0.8.16251+f3ca5575",
    "2.29.1": "2.31.24.0-0b044f4ce 2.31.24.0-1a31ba186 2.29.22.0-b486b0ade 2.24.8799.0+6f62ff7c "
    "2.9.0.2.13.26312+8e870898 0.18.27753+1cafd54f 0.9.17334+ced6ae4e",
    "2.31.1": "2.33.10.0-3dcef56f0 2.33.10.0-068180c7a 2.31.15.0-5c7949a6a 2.26.6360.0+6f180f47 "
    "2.9.0.2.15.32035+de43f57c 0.19.28492+435aae2b 0.10.18399+ed62453e",
}
NAMES = (
    "aws-neuronx-runtime-lib",
    "aws-neuronx-collectives",
    "aws-neuronx-tools",
    "neuronx-cc",
    "torch-neuronx",
    "neuronx-distributed",
    "neuronx-distributed-inference",
)


def numbers(version):
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize("name", IMAGES)
def test_the_versions_of_awss_images_are_those_of_their_sdk(name):
    versions = dict(zip(NAMES, IMAGES[name].split(), strict=True))
    found = sdks.closest(versions)
    assert found.version == name
    assert all(found.has(package, version) for package, version in versions.items())


def test_rows_are_whole():
    rows = sdks.table().sdk
    for newer, older in pairwise(rows):
        assert numbers(newer.version) > numbers(older.version)
        assert numbers(newer.packages[sdks.DRIVER][0]) >= numbers(older.packages[sdks.DRIVER][0])
    assert {".".join(row.version.split(".")[:2]) for row in rows} >= {
        f"2.{minor}" for minor in range(21, 32)
    }
    for row in rows:
        assert row.sources
        assert {*NAMES[:4], sdks.DRIVER} <= {*row.packages}
        for package, versions in row.packages.items():
            assert all(row.has(package, version.replace("*", "7")) for version in versions)


def test_releases_of_nxd_inference_are_in_the_sdk_that_the_backend_names():
    for release in releases():
        versions = {
            version
            for sdk in sdks.table().sdk
            if sdk.version.rpartition(".")[0] in release.sdk.split(" and ")
            for version in sdk.packages["neuronx-distributed-inference"]
        }
        assert {".".join(one.split(".")[:2]) for one in versions} == {release.version}


@pytest.mark.parametrize(
    ("versions", "family", "part"),
    [
        (
            {"aws-neuronx-dkms": "2.29.0.0", "aws-neuronx-runtime-lib": "2.30.51.0-fa"},
            "inf2",
            "2.33",
        ),
        ({"aws-neuronx-dkms": "2.30.2.0", "aws-neuronx-runtime-lib": "2.26.42.0-2f"}, None, "2.33"),
        ({"aws-neuronx-dkms": "2.29.0.0", "aws-neuronx-runtime-lib": "2.33.10.0-3d"}, "inf2", None),
        ({"aws-neuronx-dkms": "2.26.10.0", "aws-neuronx-runtime-lib": "2.32.31.0"}, "trn1", "2.26"),
        ({"aws-neuronx-dkms": "2.28.0.0", "aws-neuronx-runtime-lib": "2.32.31.0"}, "trn1", None),
        (
            {"aws-neuronx-dkms": "2.10.11.0", "aws-neuronx-runtime-lib": "2.24.53.0-f2"},
            "inf2",
            "SageMaker",
        ),
        (
            {"aws-neuronx-dkms": "2.21.37.0", "linux": "4.14.355-276.618.amzn2.x86_64"},
            "inf2",
            "5.10",
        ),
        ({"aws-neuronx-dkms": "2.26.5.0", "linux": "6.18.30"}, "inf2", "6.18"),
        ({"aws-neuronx-dkms": "2.26.10.0", "linux": "6.18.30"}, "inf2", None),
        ({"aws-neuron-dkms": "2.3.26.0"}, None, "first Neuron SDK"),
        ({"neuronx-distributed-inference": "0.10.18399+ed62453e"}, "inf2", "Trn2 only"),
        ({"neuronx-distributed-inference": "0.10.18399+ed62453e"}, "trn2", None),
        ({"neuronx-distributed-inference": "0.8.16251+f3ca5575"}, "inf2", None),
        # A Bottlerocket kernel names its driver like this: github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/407
        (
            {"aws-neuronx-dkms": "2.x.7693.0", "aws-neuronx-runtime-lib": "2.30.51.0-fa"},
            "inf2",
            None,
        ),
    ],
)
def test_combinations_that_fail(versions, family, part):
    found = [one.problem for one in sdks.table().conflict if one.holds(versions, family)]
    assert len(found) == (part is not None)
    assert part is None or part in found[0]


class TestMachine:
    def test_a_dlami(self, tmp_path):
        """From https://github.com/huggingface/optimum-neuron/issues/617, an inf2 with the DLAMI of 2024-05-31."""
        machine = RecordedMachine(tmp_path)
        machine.driver("2.16.7.0")
        machine.file("proc/sys/kernel/osrelease", "5.15.0-1056-aws\n")
        machine.packages(
            {
                "aws-neuronx-collectives": "2.20.22.0-c101c322e",
                "aws-neuronx-dkms": "2.16.7.0",
                "aws-neuronx-oci-hook": "2.3.0.0",
                "aws-neuronx-runtime-lib": "2.20.22.0-1b3ca6425",
                "aws-neuronx-tools": "2.17.1.0",
            }
        )
        found = sdks.machine_versions(machine.root, machine.search_path)
        assert found["aws-neuronx-dkms"] == "2.16.7.0"
        assert found["aws-neuronx-runtime-lib"] == "2.20.22.0-1b3ca6425"
        assert found["linux"] == "5.15.0-1056-aws"
        assert "aws-neuronx-oci-hook" not in found

    def test_amazon_linux(self, tmp_path):
        """From https://github.com/huggingface/optimum-neuron/issues/658; what is not installed rpm says in words."""
        machine = RecordedMachine(tmp_path)
        machine.program(
            "rpm",
            "installed aws-neuronx-collectives 2.21.46.0_69b77134b\n"
            "installed aws-neuronx-dkms 2.17.17.0\n"
            "installed aws-neuronx-runtime-lib 2.21.41.0_fb1705f5f\n"
            "package aws-neuron-dkms is not installed\n",
            status=1,
        )
        found = sdks.system_packages(machine.search_path)
        assert found == {
            "aws-neuronx-collectives": "2.21.46.0_69b77134b",
            "aws-neuronx-dkms": "2.17.17.0",
            "aws-neuronx-runtime-lib": "2.21.41.0_fb1705f5f",
        }
        assert "aws-neuronx-dkms" not in sdks.machine_versions(machine.root, machine.search_path)

    def test_a_package_that_was_removed_is_not_there(self, tmp_path):
        machine = RecordedMachine(tmp_path)
        machine.packages({"aws-neuronx-tools": "2.17.1.0"}, status="config-files")
        assert sdks.system_packages(machine.search_path) == {}

    @pytest.mark.parametrize("text", ["", "\xff\n", "installed\n", "installed aws-neuronx-tools\n"])
    @pytest.mark.parametrize("status", [0, 2])
    def test_programs_that_print_nonsense(self, tmp_path, text, status):
        machine, unread = RecordedMachine(tmp_path), {}
        machine.program("dpkg-query", text, status)
        assert not any(sdks.system_packages(machine.search_path, unread).values())
        named = status == 2 or (text != "" and "aws" not in text)
        assert unread.keys() == ({"dpkg-query"} if named else set())
