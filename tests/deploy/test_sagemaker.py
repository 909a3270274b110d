"""deploy/sagemaker: what its commands would create, value by value, and their calls against moto and botocore."""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import boto3
import pytest
from botocore import xform_name
from botocore.session import get_session
from moto import mock_aws

from deploy.sagemaker import __main__ as deploy
from deploy.sagemaker import calls as aws
from deploy.sagemaker import endpoint, iam
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.planning import machines
from djl_python_neuronx.telemetry import METRICS
from tests.doubles import moto_sagemaker

MODELS = Path(__file__).parents[1] / "planning" / "models"
ACCOUNT, REGION, NAME = "123456789012", "us-east-2", "chat"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/chat"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/djl-neuronx:nxdi"
MODEL = "s3://models/llama-3-8b"
ADDED = {"OPTION_MODEL_NAME": "chat", "OPTION_CLOUDWATCH_NAMESPACE": "djl-neuronx/chat"}
"""Variables of every container: where the dashboard and the autoscaling look for its metrics."""
LLAMA_8B_BYTES = 8_030_261_248 * 2
"""Source: the parameters of Meta-Llama-3-8B, in bfloat16."""


@pytest.fixture
def folder(tmp_path):
    """A function that gives the folder of a model with nothing but its config.json."""

    def of(model):
        (tmp_path / model).mkdir(exist_ok=True)
        shutil.copy(MODELS / f"{model}.json", tmp_path / model / "config.json")
        return str(tmp_path / model)

    return of


def refuse(monkeypatch, operation, message):
    """An error of moto's answer to an operation."""
    moto_sagemaker.refuse(operation, message, monkeypatch.setattr)


@pytest.fixture
def moto(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    moto_sagemaker.complete(monkeypatch.setattr)
    with mock_aws():
        yield


@pytest.fixture
def calls(folder, capsys, monkeypatch):
    """A function that gives the calls of a dry run: parameters by operation. It has neither credentials nor network."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    def dry_run(*words, model="llama-3-8b", instance="ml.inf2.48xlarge", **env):
        status = deploy.main(
            [*arguments(folder(model), *words, instance=instance, **env), "--dry-run"]
        )
        assert status == 0, capsys.readouterr().err
        rows = json.loads(capsys.readouterr().out)
        found = {row["operation"]: row["parameters"] for row in rows}
        assert len(found) == len(rows)
        return found

    return dry_run


def arguments(folder, command, *words, instance="ml.inf2.48xlarge", **env):
    """Of a command; `folder`: of the plan, or None."""
    start = [command, "--name", NAME, "--region", REGION]
    if command == "delete":
        return [*start, *words]
    variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    data = () if "HF_MODEL_ID" in env else ("--model-data", MODEL)
    planned = () if folder is None else ("--plan", folder)
    made = ["--image", IMAGE, "--role", ROLE, "--instance", instance, *planned, *data]
    return [*start, *made, *variables, *words]


def refused(capsys, *words):
    """The error of a command."""
    assert deploy.main(words) == 1
    found = capsys.readouterr()
    assert not found.out
    return found.err


def variant(found):
    (only,) = found["create_endpoint_config"]["ProductionVariants"]
    return only


class TestDeploy:
    def test_the_model_is_a_prefix_without_an_archive(self, calls):
        model = calls("deploy", OPTION_COMPILATION="forbid")["create_model"]
        assert model == {
            "ModelName": "chat-1",
            "ExecutionRoleArn": ROLE,
            "PrimaryContainer": {
                "Image": IMAGE,
                "Environment": {
                    "OPTION_COMPILATION": "forbid",
                    **ADDED,
                    "OPTION_MODEL_LOADING_TIMEOUT": "483",  # of the whole start
                },
                "ModelDataSource": {
                    "S3DataSource": {
                        "S3Uri": "s3://models/llama-3-8b/",
                        "S3DataType": "S3Prefix",
                        "CompressionType": "None",
                    }
                },
            },
        }

    def test_an_archive_is_an_object(self, calls):
        found = calls(
            "deploy", "--model-data", "s3://models/llama/model.tar.gz", OPTION_COMPILATION="forbid"
        )
        source = found["create_model"]["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]
        assert source == {
            "S3Uri": "s3://models/llama/model.tar.gz",
            "S3DataType": "S3Object",
            "CompressionType": "Gzip",
        }

    def test_the_environment_is_one_that_the_package_accepts(self, calls, tmp_path):
        given = {
            "OPTION_TENSOR_PARALLEL_DEGREE": "2",
            "OPTION_REPLICAS": "max",
            "OPTION_COMPILATION": "forbid",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "60",
        }
        environ = calls("deploy", **given)["create_model"]["PrimaryContainer"]["Environment"]
        assert given.items() <= environ.items()
        problems = Problems()
        options = read_settings(None, tmp_path, environ, problems, {}).options
        assert problems.messages("error") == ()
        assert options.model_names == ("chat",)
        assert options.cloudwatch_namespace == "djl-neuronx/chat"
        assert (options.tensor_parallel_degree, options.replicas, options.predict_timeout) == (
            2,
            "max",
            60,
        )

    def test_timeouts_are_longer_than_the_estimates(self, calls):
        found = variant(calls("deploy", instance="ml.inf2.8xlarge"))
        transfer_s = LLAMA_8B_BYTES / 100e6
        # 6 prefill and 6 decode graphs of 32 layers, 3 s each, and at most twice that.
        compile_s = 2 * 12 * 32 * 3
        assert found["ModelDataDownloadTimeoutInSeconds"] == pytest.approx(transfer_s + 300, abs=2)
        startup_s = found["ContainerStartupHealthCheckTimeoutInSeconds"]
        assert startup_s == pytest.approx(compile_s + transfer_s + 300, abs=2)

    def test_compiled_beforehand_waits_for_no_compiler(self, calls):
        found = variant(calls("deploy", instance="ml.inf2.8xlarge", OPTION_COMPILATION="forbid"))
        startup_s = found["ContainerStartupHealthCheckTimeoutInSeconds"]
        assert startup_s == pytest.approx(LLAMA_8B_BYTES / 100e6 + 300, abs=2)

    def test_a_container_that_downloads_has_the_time_for_it(self, calls):
        env = {"HF_MODEL_ID": "meta-llama/Meta-Llama-3-8B", "OPTION_COMPILATION": "forbid"}
        found = calls("deploy", **env, instance="ml.inf2.8xlarge")
        assert "ModelDataSource" not in found["create_model"]["PrimaryContainer"]
        startup_s = variant(found)["ContainerStartupHealthCheckTimeoutInSeconds"]
        assert startup_s == pytest.approx(2 * LLAMA_8B_BYTES / 100e6 + 300, abs=2)
        assert variant(found)["ModelDataDownloadTimeoutInSeconds"] == 300

    def test_the_instance_and_its_disk(self, calls):
        env = {"OPTION_COMPILATION": "forbid", "OPTION_TENSOR_PARALLEL_DEGREE": "2"}
        found = variant(calls("deploy", **env))
        assert found["InstanceType"] == "ml.inf2.48xlarge"
        assert machines.known(found["InstanceType"]) in machines.INSTANCES.values()
        assert found["VolumeSizeInGB"] == 32 + 30  # twice 14.96 GiB
        assert found["InitialInstanceCount"] == 1
        assert found["ModelName"] == "chat-1"
        # Cut for 24 cores, with 48 query and 24 KV heads in place of 32 and 8, it is larger.
        padded = LLAMA_8B_BYTES + 32 * 2 * 4096 * 128 * (16 + 16) * 2
        cut = variant(
            calls("deploy", OPTION_COMPILATION="forbid", OPTION_TENSOR_PARALLEL_DEGREE="24")
        )
        assert cut["VolumeSizeInGB"] == pytest.approx(32 + 2 * padded / 2**30, abs=1)
        # Trn1 has disks of its own.
        trn1 = variant(calls("deploy", instance="ml.trn1.32xlarge", **env))
        assert "VolumeSizeInGB" not in trn1

    def test_the_order_of_the_calls(self, calls):
        found = calls("deploy", "--max-instances", "2", OPTION_COMPILATION="forbid")
        assert list(found) == [
            "create_model",
            "create_endpoint_config",
            "create_endpoint",
            "describe_endpoint",
            "register_scalable_target",
            "put_scaling_policy",
            "put_dashboard",
        ]
        assert found["create_endpoint"] == {"EndpointName": NAME, "EndpointConfigName": "chat-1"}

    def test_one_instance_is_not_scaled(self, calls):
        found = calls("deploy", OPTION_COMPILATION="forbid")
        assert not {"register_scalable_target", "put_scaling_policy"} & found.keys()


class TestScaling:
    def test_concurrent_requests_by_the_slots_of_all_copies(self, calls):
        env = {
            "OPTION_COMPILATION": "forbid",
            "OPTION_TENSOR_PARALLEL_DEGREE": "2",
            "OPTION_MAX_ROLLING_BATCH_SIZE": "16",
            "OPTION_REPLICAS": "max",
        }
        found = calls("deploy", "--max-instances", "4", **env)
        assert found["register_scalable_target"] == {
            "ServiceNamespace": "sagemaker",
            "ResourceId": "endpoint/chat/variant/main",
            "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
            "MinCapacity": 1,
            "MaxCapacity": 4,
        }
        tracking = found["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
        assert tracking["PredefinedMetricSpecification"] == {
            "PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"
        }
        assert tracking["TargetValue"] == pytest.approx(0.7 * 12 * 16)  # 24 cores are 12 copies
        # A new instance is not asked for again before it can have started.
        times = variant(found)
        started_s = sum(times[name] for name in times if name.endswith("TimeoutInSeconds"))
        assert tracking["ScaleOutCooldown"] >= started_s

    def test_our_own_metric(self, calls):
        words = ("--max-instances", "2", "--scale-on", "slots_in_use", "--target-value", "9")
        found = calls("deploy", *words, OPTION_COMPILATION="forbid")
        tracking = found["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
        assert METRICS["slots_in_use"].kind == "gauge"
        assert tracking["TargetValue"] == 9
        assert tracking["CustomizedMetricSpecification"] == {
            "Namespace": "djl-neuronx/chat",
            "MetricName": "djl_neuronx_slots_in_use",
            "Dimensions": [{"Name": "model", "Value": "chat"}],
            "Statistic": "Average",
        }

    def test_a_namespace_that_is_given(self, calls, capsys, folder):
        words = ("--max-instances", "2", "--scale-on", "slots_in_use")
        env = {"OPTION_COMPILATION": "forbid", "OPTION_CLOUDWATCH_NAMESPACE": "team/llama"}
        found = calls("deploy", *words, **env)
        environ = found["create_model"]["PrimaryContainer"]["Environment"]
        assert environ["OPTION_CLOUDWATCH_NAMESPACE"] == "team/llama"
        tracking = found["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
        assert tracking["CustomizedMetricSpecification"]["Namespace"] == "team/llama"
        shown = found["put_dashboard"]["DashboardBody"]
        assert "team/llama" in shown
        assert "djl-neuronx/" not in shown

        env["OPTION_CLOUDWATCH_NAMESPACE"] = ""  # none
        shown = calls("deploy", **env)["put_dashboard"]["DashboardBody"]
        assert "djl_neuronx_" not in shown
        assert "AWS/SageMaker" in shown
        error = refused(capsys, *arguments(folder("llama-3-8b"), "deploy", *words, **env))
        assert "OPTION_CLOUDWATCH_NAMESPACE" in error

    def test_asynchronous_requests_by_their_backlog(self, calls):
        words = ("--async-output", "s3://models/answers", "--max-instances", "3")
        env = {"OPTION_COMPILATION": "forbid", "OPTION_MAX_ROLLING_BATCH_SIZE": "8"}
        found = calls("deploy", *words, **env)
        assert found["create_endpoint_config"]["AsyncInferenceConfig"] == {
            "OutputConfig": {"S3OutputPath": "s3://models/answers"},
            "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 8},
        }
        env |= {"OPTION_REPLICAS": "max", "OPTION_TENSOR_PARALLEL_DEGREE": "2"}
        env["OPTION_MAX_ROLLING_BATCH_SIZE"] = "128"  # 12 copies
        many = calls("deploy", *words, **env)["create_endpoint_config"]["AsyncInferenceConfig"]
        assert many["ClientConfig"] == {"MaxConcurrentInvocationsPerInstance": 1000}
        assert variant(found)["InitialInstanceCount"] == 1
        assert found["register_scalable_target"]["MinCapacity"] == 1
        tracking = found["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
        assert tracking["CustomizedMetricSpecification"] == {
            "Namespace": "AWS/SageMaker",
            "MetricName": "ApproximateBacklogSizePerInstance",
            "Dimensions": [{"Name": "EndpointName", "Value": NAME}],
            "Statistic": "Average",
        }

    def test_the_first_request_starts_an_instance(self, moto, folder):
        """Target tracking alone would wait for more requests than its target."""
        words = ("--async-output", "s3://models/answers", "--min-instances", "0")
        env = {"OPTION_COMPILATION": "forbid"}
        assert deploy.main(arguments(folder("llama-3-8b"), "deploy", *words, **env)) == 0
        scaling = boto3.client("application-autoscaling", region_name=REGION)
        (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")[
            "ScalableTargets"
        ]
        assert (target["MinCapacity"], target["MaxCapacity"]) == (0, 1)
        policies = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")[
            "ScalingPolicies"
        ]
        (step,) = [one for one in policies if one["PolicyType"] == "StepScaling"]
        assert len(policies) == 2
        (adjustment,) = step["StepScalingPolicyConfiguration"]["StepAdjustments"]
        assert adjustment == {"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}
        cloudwatch = boto3.client("cloudwatch", region_name=REGION)
        (alarm,) = cloudwatch.describe_alarms(AlarmNames=["chat-from-zero"])["MetricAlarms"]
        assert alarm["AlarmActions"] == [step["PolicyARN"]]
        assert (alarm["Namespace"], alarm["MetricName"]) == (
            "AWS/SageMaker",
            "HasBacklogWithoutCapacity",
        )
        assert alarm["Dimensions"] == [{"Name": "EndpointName", "Value": NAME}]
        assert (alarm["ComparisonOperator"], alarm["Threshold"]) == (
            "GreaterThanOrEqualToThreshold",
            1,
        )
        assert deploy.main(arguments("", "delete", "--version", "1")) == 0
        assert cloudwatch.describe_alarms()["MetricAlarms"] == []


class TestInferenceComponents:
    ENV = {"OPTION_COMPILATION": "forbid", "OPTION_TENSOR_PARALLEL_DEGREE": "8"}  # noqa: RUF012

    def test_copies(self, calls):
        found = calls("deploy", "--copies", "2", "--max-copies", "3", **self.ENV)
        config = found["create_endpoint_config"]
        assert "ModelName" not in variant(found)
        assert config["ExecutionRoleArn"] == ROLE
        made = found["create_inference_component"]
        assert (made["EndpointName"], made["VariantName"]) == (NAME, "main")
        assert made["RuntimeConfig"] == {"CopyCount": 2}
        specification = made["Specification"]
        assert specification["ModelName"] == found["create_model"]["ModelName"]
        needs = specification["ComputeResourceRequirements"]
        # Each is on 4 of 12 chips: all three are on one instance.
        assert variant(found)["InitialInstanceCount"] == 1
        assert variant(found)["ManagedInstanceScaling"] == {
            "Status": "ENABLED",
            "MinInstanceCount": 1,
            "MaxInstanceCount": 1,
        }
        assert variant(found)["VolumeSizeInGB"] == pytest.approx(32 + 4 * 15, abs=1)
        # 8 cores are 4 chips of Inferentia2; the weights pass through the host's memory.
        assert needs["NumberOfAcceleratorDevicesRequired"] == 4
        host_gib = machines.INSTANCES["inf2.48xlarge"].host_memory_gib
        assert LLAMA_8B_BYTES / 2**20 < needs["MinMemoryRequiredInMb"] < host_gib * 1024 / 3
        assert found["register_scalable_target"] == {
            "ServiceNamespace": "sagemaker",
            "ResourceId": "inference-component/chat",
            "ScalableDimension": "sagemaker:inference-component:DesiredCopyCount",
            "MinCapacity": 2,
            "MaxCapacity": 3,
        }
        policy = found["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
        assert policy["PredefinedMetricSpecification"] == {
            "PredefinedMetricType": "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
        }

    def test_instances_for_all_copies(self, calls):
        found = calls("deploy", "--copies", "4", "--max-copies", "10", **self.ENV)
        scaling = variant(found)["ManagedInstanceScaling"]
        assert (scaling["MinInstanceCount"], scaling["MaxInstanceCount"]) == (2, 4)
        assert variant(found)["InitialInstanceCount"] == 2

    def test_instances_and_copies_contradict(self, capsys, folder):
        words = ("deploy", "--copies", "2", "--max-instances", "3")
        assert "--max-copies" in refused(
            capsys, *arguments(folder("llama-3-8b"), *words, **self.ENV)
        )

    def test_copies_of_two_in_a_container(self, calls):
        found = calls("deploy", "--copies", "1", OPTION_REPLICAS="2", **self.ENV)
        needs = found["create_inference_component"]["Specification"]["ComputeResourceRequirements"]
        assert needs["NumberOfAcceleratorDevicesRequired"] == 8  # 2 x 8 cores

    def test_as_many_in_a_container_as_an_instance_has_room_for(self, capsys, folder):
        given = arguments(
            folder("llama-3-8b"), "deploy", "--copies", "1", OPTION_REPLICAS="max", **self.ENV
        )
        assert "set OPTION_REPLICAS to a number" in refused(capsys, *given)

    def test_an_update_replaces_the_copies_one_by_one(self, calls):
        found = calls("update", "--version", "2", "--copies", "2", **self.ENV)
        assert list(found) == [
            "create_model",
            "update_inference_component",
            "describe_inference_component",
            "put_dashboard",
        ]
        made = found["update_inference_component"]
        assert made["Specification"]["ModelName"] == "chat-2"
        rolling = made["DeploymentConfig"]["RollingUpdatePolicy"]
        assert rolling["MaximumBatchSize"] == {"Type": "COPY_COUNT", "Value": 1}
        assert 600 <= rolling["MaximumExecutionTimeoutInSeconds"] <= 28800

    def test_a_copy_that_the_host_cannot_load(self, capsys, folder):
        words = ("deploy", "--copies", "1")
        given = arguments(
            folder("llama-3-8b"), *words, instance="ml.inf2.xlarge", OPTION_COMPILATION="forbid"
        )
        assert "ml.inf2.xlarge has 16 GiB" in refused(capsys, *given)


class TestUpdate:
    def test_blue_green(self, calls):
        found = calls("update", "--version", "2", OPTION_COMPILATION="forbid")
        made = found["update_endpoint"]
        assert (
            made["EndpointConfigName"]
            == found["create_endpoint_config"]["EndpointConfigName"]
            == "chat-2"
        )
        assert made["RetainAllVariantProperties"] is True
        (kind,) = made["DeploymentConfig"]
        assert kind == "BlueGreenUpdatePolicy"
        longest_s = made["DeploymentConfig"][kind]["MaximumExecutionTimeoutInSeconds"]
        assert longest_s > 600 + LLAMA_8B_BYTES / 100e6
        assert "create_endpoint" not in found

    def test_rolling_has_the_time_of_all_instances(self, calls):
        words = (
            "--version",
            "2",
            "--strategy",
            "rolling",
            "--min-instances",
            "2",
            "--max-instances",
            "4",
        )
        found = calls("update", *words, OPTION_COMPILATION="forbid")
        rolling = found["update_endpoint"]["DeploymentConfig"]["RollingUpdatePolicy"]
        assert rolling["MaximumBatchSize"] == {"Type": "INSTANCE_COUNT", "Value": 1}
        times = variant(found)
        once_s = sum(times[name] for name in times if name.endswith("TimeoutInSeconds"))
        assert rolling["MaximumExecutionTimeoutInSeconds"] > 4 * once_s

    def test_its_slots_are_the_new_target_of_the_autoscaling(self, calls):
        def policy(command, slots):
            env = {"OPTION_COMPILATION": "forbid", "OPTION_MAX_ROLLING_BATCH_SIZE": slots}
            words = (command, "--version", slots, "--max-instances", "2")
            return calls(*words, **env)["put_scaling_policy"]

        first, second = policy("deploy", "10"), policy("update", "20")
        assert first["PolicyName"] == second["PolicyName"]  # so that it takes the place
        target = "TargetTrackingScalingPolicyConfiguration"
        assert (first[target]["TargetValue"], second[target]["TargetValue"]) == (7, 14)

    def test_the_version_of_a_deploy_is_refused(self, folder, capsys):
        assert deploy.main(arguments(folder("llama-3-8b"), "update", "--dry-run")) == 1
        assert "--version 1 is what `deploy` creates" in capsys.readouterr().err


class TestDelete:
    def test_everything_that_was_made(self):
        words = ("--version", "1", "--version", "2")
        made = endpoint.delete(deploy.parser().parse_args(arguments("", "delete", *words)))
        assert [(call.operation, [*call.parameters.values()][-1]) for call in made] == [
            ("deregister_scalable_target", "sagemaker:variant:DesiredInstanceCount"),
            ("deregister_scalable_target", "sagemaker:inference-component:DesiredCopyCount"),
            ("delete_alarms", ["chat-from-zero"]),
            ("delete_inference_component", "chat"),
            ("describe_inference_component", "chat"),
            ("delete_endpoint", "chat"),
            ("delete_endpoint_config", "chat-1"),
            ("delete_model", "chat-1"),
            ("delete_endpoint_config", "chat-2"),
            ("delete_model", "chat-2"),
            ("delete_dashboards", ["chat"]),
        ]

    def test_what_is_left_of_it(self, moto):
        """The endpoint alone; then nothing at all."""
        sagemaker = boto3.client("sagemaker", region_name=REGION)
        sagemaker.create_model(ModelName="chat-1", ExecutionRoleArn=ROLE)
        for _ in range(2):
            assert deploy.main(arguments("", "delete", "--version", "1")) == 0
            assert sagemaker.list_models()["Models"] == []

    def test_a_refusal_is_an_error(self, moto, monkeypatch, capsys):
        refuse(monkeypatch, "delete_inference_component", "Cannot delete it while it is created")
        assert "Cannot delete it" in refused(capsys, *arguments("", "delete", "--version", "1"))


class TestRefused:
    def test_serverless(self, capsys, folder):
        given = arguments(folder("llama-3-8b"), "deploy", "--serverless")
        assert "serverless inference has no accelerators" in refused(capsys, *given)

    def test_a_model_that_does_not_fit(self, capsys, folder):
        given = arguments(folder("llama-3-70b"), "deploy", instance="ml.inf2.8xlarge")
        error = refused(capsys, *given)
        assert "this cannot be served on ml.inf2.8xlarge" in error
        assert "GiB" in error

    @pytest.mark.parametrize(
        ("model", "instance", "env", "fix"),
        [
            ("llama-3-70b", "ml.inf2.48xlarge", {}, "compile beforehand"),
            ("bloom-176b", "ml.trn1.32xlarge", {"OPTION_COMPILATION": "forbid"}, "--model-gib"),
            (
                "llama-2-13b",
                "ml.trn1.32xlarge",
                {
                    "OPTION_COMPILATION": "forbid",
                    "OPTION_REPLICAS": "16",
                    "OPTION_TENSOR_PARALLEL_DEGREE": "2",
                    "OPTION_N_POSITIONS": "512",
                    "OPTION_MAX_ROLLING_BATCH_SIZE": "1",
                },
                "lower OPTION_REPLICAS",
            ),
        ],
    )
    def test_a_start_that_no_timeout_covers(self, capsys, folder, model, instance, env, fix):
        given = arguments(folder(model), "deploy", instance=instance, **env)
        error = refused(capsys, *given)
        assert "SageMaker allows 3600 s" in error
        assert fix in error

    @pytest.mark.parametrize(
        "instance", ["ml.g5.xlarge", "inf2.xlarge", "ml.inf1.xlarge", "ml.trn2.3xlarge"]
    )
    def test_an_instance_that_endpoints_or_the_package_lack(self, capsys, folder, instance):
        error = refused(capsys, *arguments(folder("llama-3-8b"), "deploy", instance=instance))
        assert f"'{instance}' is not a Neuron instance" in error
        assert "ml.inf2.48xlarge" in error

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("TENSOR_DEGREE", "nothing in the image reads the variable TENSOR_DEGREE"),
            ("OPTION_TENSOR_DEGREE", "tensor_degree"),
            ("OPTION_REPLICAS", "OPTION_REPLICAS"),
        ],
    )
    def test_a_variable_that_the_package_refuses(self, capsys, folder, name, words):
        assert words in refused(
            capsys, *arguments(folder("llama-3-8b"), "deploy", **{name: "many"})
        )

    def test_more_copies_than_cores(self, capsys, folder):
        env = {
            "OPTION_REPLICAS": "13",
            "OPTION_TENSOR_PARALLEL_DEGREE": "2",
            "OPTION_COMPILATION": "forbid",
        }
        assert "26 NeuronCores" in refused(
            capsys, *arguments(folder("llama-3-8b"), "deploy", **env)
        )

    def test_no_instances_without_a_queue(self, capsys, folder):
        given = arguments(folder("llama-3-8b"), "deploy", "--min-instances", "0")
        assert "--async-output" in refused(capsys, *given)

    @pytest.mark.parametrize(
        ("word", "value", "expected"),
        [
            ("--name", "my_model", "does not allow 'my_model-1'"),
            ("--name", "a" * 63, "has 65 characters, at most 63"),
            ("--env", f"OPTION_ENV={'A' * 1025}", "OPTION_ENV has 1025 characters"),
            ("--image", "docker.io/x:1", "not an image of ECR"),
            ("--image", IMAGE.replace(REGION, "us-west-2"), "--image is in us-west-2"),
            ("--ami-version", "none", "does not allow 'none'"),
            ("--model-gib", "300", "a volume of 632 GiB, and SageMaker allows 512"),
        ],
    )
    def test_what_the_service_would_refuse(self, capsys, folder, word, value, expected):
        given = arguments(folder("llama-3-8b"), "deploy", OPTION_COMPILATION="forbid")
        assert expected in refused(capsys, *given, word, value)

    @pytest.mark.parametrize(
        ("word", "value", "expected"),
        [
            ("--role", "chat", "'chat' is not arn:aws:iam::ACCOUNT:role/NAME"),
            ("--region", "mars", "'mars'"),
            ("--model-data", "llama", "'llama' is not s3://bucket/folder"),
            ("--model-gib", "-1", "'-1' is not a number above 0"),
            ("--target-value", "nan", "'nan' is not a number above 0"),
            ("--min-instances", "-1", "'-1' is not a number from 0 on"),
            ("--env", "A", "'A' is not NAME=VALUE"),
        ],
    )
    def test_values_that_say_nothing(self, capsys, folder, word, value, expected):
        given = arguments(folder("llama-3-8b"), "deploy", f"{word}={value}")
        with pytest.raises(SystemExit):
            deploy.main(given)
        assert f"argument {word}: " in (error := capsys.readouterr().err)
        assert expected in error

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (("--max-copies", "2"), "--max-copies needs --copies"),
            (("--copies", "0"), "--copies 0 would serve nothing"),
            (("--max-instances", "0"), "maximum 0 is less than the minimum 1"),
            (("--copies", "2", "--max-copies", "1"), "maximum 1 is less than the minimum 2"),
            (("--scale-on", "slots_in_use"), "need a maximum above the minimum"),
            (("--target-value", "5"), "need a maximum above the minimum"),
            (("--copies", "1", "--async-output", "s3://m/a"), "exclude each other"),
            (
                ("--async-output", "s3://m/a", "--max-instances", "2", "--scale-on", "concurrency"),
                "leave it out",
            ),
        ],
    )
    def test_arguments_that_contradict_each_other(self, capsys, folder, words, expected):
        assert expected in refused(capsys, *arguments(folder("llama-3-8b"), "deploy", *words))

    def test_no_model(self, capsys, folder):
        given = [one for one in arguments(folder("llama-3-8b"), "deploy") if "s3:" not in one]
        given.remove("--model-data")
        assert "--model-data" in refused(capsys, *given)


class TestCompile:
    OUTPUT = ("--output", "s3://models/compiled/llama")

    def test_without_a_device(self, calls):
        found = calls("compile", *self.OUTPUT, OPTION_N_POSITIONS="4096")
        assert list(found) == ["create_processing_job", "describe_processing_job"]
        job = found["create_processing_job"]
        assert found["describe_processing_job"] == {"ProcessingJobName": job["ProcessingJobName"]}
        assert job["AppSpecification"] == {
            "ImageUri": IMAGE,
            "ContainerArguments": [
                *(
                    "compile",
                    MODEL,
                    "--output",
                    "s3://models/compiled/llama",
                    "--instance",
                    "inf2.48xlarge",
                )
            ],
        }
        # The compiled model has the options that the endpoint gets, but no endpoint's name.
        assert job["Environment"] == {"OPTION_N_POSITIONS": "4096"}
        cluster = job["ProcessingResources"]["ClusterConfig"]
        enum = get_session().get_service_model("sagemaker").shape_for("ProcessingInstanceType").enum
        assert cluster["InstanceType"] in enum
        assert not [name for name in enum if machines.known(name)]  # else a job could have a device
        assert cluster["VolumeSizeInGB"] * 2**30 > 3 * LLAMA_8B_BYTES
        estimate_s = 12 * 32 * 3
        assert job["StoppingCondition"]["MaxRuntimeInSeconds"] > 2 * estimate_s

    def test_a_model_of_the_hub(self, calls):
        """The command names it; a variable beside that would contradict what `compile` records."""
        name = "meta-llama/Meta-Llama-3-8B"
        job = calls("compile", *self.OUTPUT, HF_MODEL_ID=name)["create_processing_job"]
        assert job["AppSpecification"]["ContainerArguments"][:2] == ["compile", name]
        assert job["Environment"] == {}

    @pytest.mark.parametrize(
        ("model", "least_gib"),
        # Twice the weights: of the checkpoint and cut for 24 cores, where 64 heads become 72.
        [("llama-3-8b", 2 * 15), ("llama-3-70b", 2 * 131)],
    )
    def test_its_machine_has_the_memory(self, calls, model, least_gib):
        found = calls("compile", *self.OUTPUT, model=model)
        cluster = found["create_processing_job"]["ProcessingResources"]["ClusterConfig"]
        memory_gib = {"ml.m5.12xlarge": 192, "ml.m5.24xlarge": 384, "ml.r5.24xlarge": 768}
        assert memory_gib[cluster["InstanceType"]] > least_gib + 64

    def test_on_a_device(self, calls):
        words = ("--ami", "ami-0123456789abcdef0", "--instance-profile", "compile")
        found = calls(
            "compile", *self.OUTPUT, *words, OPTION_MODEL_LOADER="tnx", OPTION_ENV="A=b c"
        )
        made = found["run_instances"]
        assert made["InstanceType"] == "inf2.48xlarge"
        assert made["InstanceInitiatedShutdownBehavior"] == "terminate"
        assert made["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 2}
        (disk,) = made["BlockDeviceMappings"]
        assert disk["Ebs"]["VolumeSize"] * 2**30 > 3 * LLAMA_8B_BYTES
        lines = made["UserData"].splitlines()
        assert lines[0] == "#!/bin/bash"
        # It ends after a time, and whatever the compile comes to.
        assert int(re.fullmatch(r"shutdown -P \+(\d+)", lines[1])[1]) > 60
        run = lines[-1]
        assert all(f"--device=/dev/neuron{number} " in run for number in range(12))
        assert "/dev/neuron12" not in run
        assert "'--env=OPTION_ENV=A=b c'" in run
        assert run.endswith(
            f"compile {MODEL} --output s3://models/compiled/llama --instance inf2.48xlarge"
        )

    @pytest.mark.parametrize("status", [0, 1])
    def test_the_device_is_given_back_whatever_comes_of_it(self, calls, tmp_path, status):
        """The script of the instance, with programs that write down how they are called."""
        words = ("--ami", "ami-1", "--instance-profile", "compile", "--output", "s3://m/it's here")
        script = calls("compile", *words)["run_instances"]["UserData"]
        for name in ("aws", "docker", "shutdown"):
            program = tmp_path / name
            code = f"exit {status}" if name == "docker" else ""
            program.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\n{code}\n')
            program.chmod(0o755)
        script = script.replace("/var/log/compile.log", f"{tmp_path}/log")
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        subprocess.run(["/bin/bash", "-c", script], env=environ, timeout=60, check=False)
        called = (tmp_path / "called").read_text().splitlines()
        assert called[0].startswith("shutdown -P +")
        assert f"aws ecr get-login-password --region {REGION}" in called
        registry = IMAGE.partition("/")[0]
        assert f"docker login --username AWS --password-stdin {registry}" in called
        assert any(line.startswith("docker run ") for line in called[1:-2])
        assert called[-2:] == [f"aws s3 cp {tmp_path}/log s3://m/it's here.log", "shutdown -P now"]

    def test_the_other_library_on_a_device(self, calls):
        words = ("--ami", "ami-0123456789abcdef0", "--instance-profile", "compile")
        assert list(calls("compile", *self.OUTPUT, *words)) == ["run_instances"]

    def test_an_output_that_would_be_lost(self, capsys, folder):
        with pytest.raises(SystemExit):
            deploy.main(arguments(folder("llama-3-8b"), "compile", "--output", "/tmp/compiled"))
        assert "not s3://bucket/folder" in capsys.readouterr().err

    def test_a_device_needs_an_image_and_a_role(self, capsys, folder):
        given = arguments(folder("llama-3-8b"), "compile", *self.OUTPUT, OPTION_MODEL_LOADER="tnx")
        error = refused(capsys, *given)
        assert "--ami" in error
        assert "OPTION_MODEL_LOADER=nxdi" in error
        assert "--instance-profile" in refused(capsys, *given, "--ami", "ami-1")


class TestPlanFromS3:
    """Without `--plan` the model's own settings count: 12 copies with 4 slots."""

    SETTINGS = (
        "option.tensor_parallel_degree=2\noption.replicas=max\noption.max_rolling_batch_size=4\n"
        "option.compilation=forbid\noption.n_positions=2048\n"
    )

    @pytest.fixture
    def bucket(self, monkeypatch):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with mock_aws():
            client = boto3.client("s3")
            client.create_bucket(Bucket="models")
            yield client

    def put(self, bucket, key, text):
        bucket.put_object(Bucket="models", Key=f"llama-3-8b/{key}", Body=text.encode())

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ("config.json", ""),
            ("optimized_model/config.json", "option.model_id=./optimized_model\n"),
        ],
    )
    def test_with_settings(self, bucket, capsys, config, named):
        self.put(bucket, config, (MODELS / "llama-3-8b.json").read_text())
        self.put(bucket, "serving.properties", self.SETTINGS + named)
        assert "no weights" in refused(capsys, *arguments(None, "deploy"))
        self.put(bucket, config.replace("config.json", "model.safetensors"), "")
        given = [*arguments(None, "deploy", "--max-instances", "2"), "--dry-run"]
        assert deploy.main(given) == 0, capsys.readouterr().err
        found = {row["operation"]: row["parameters"] for row in json.loads(capsys.readouterr().out)}
        tracking = found["put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
        assert tracking["TargetValue"] == pytest.approx(0.7 * 12 * 4, abs=0.1)
        startup_s = variant(found)["ContainerStartupHealthCheckTimeoutInSeconds"]
        assert startup_s == pytest.approx(12 * LLAMA_8B_BYTES / 100e6 + 300, abs=2)
        container = found["create_model"]["PrimaryContainer"]
        assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://models/llama-3-8b/"

    def test_without_settings(self, bucket, capsys):
        self.put(bucket, "config.json", (MODELS / "llama-3-8b.json").read_text())
        given = arguments(None, "deploy", instance="ml.inf2.8xlarge")
        assert "s3://models/llama-3-8b has no weights" in refused(capsys, *given, "--dry-run")
        self.put(bucket, "model-00001-of-00002.safetensors", "")
        assert deploy.main([*given, "--dry-run"]) == 0, capsys.readouterr().err

    def test_settings_that_are_wrong(self, bucket, capsys):
        self.put(bucket, "config.json", (MODELS / "llama-3-8b.json").read_text())
        self.put(bucket, "serving.properties", "option.tensor_parallel_degre=2\n")
        self.put(bucket, "model.safetensors", "")
        assert "tensor_parallel_degre" in refused(capsys, *arguments(None, "deploy"))

    def test_no_model(self, bucket, capsys):
        assert "config.json" in refused(capsys, *arguments(None, "deploy"))

    def test_an_archive(self, capsys):
        data = ("--model-data", "s3://models/llama/model.tar.gz")
        assert "give --plan" in refused(capsys, *arguments(None, "deploy", *data))


IN_VPC = {"Subnets": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}
TAGS = [{"Key": "team", "Value": "chat"}, {"Key": "cost", "Value": "1=2"}]


class TestAccount:
    VPC = ("--subnet", "subnet-1", "--subnet", "subnet-2", "--security-group", "sg-1")
    KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    GIVEN = (*VPC, "--kms-key", KEY, "--tag", "team=chat", "--tag", "cost=1=2")

    def test_an_endpoint(self, calls):
        queue = ("--async-output", "s3://models/answers")
        found = calls("deploy", *self.GIVEN, *queue)
        config = found["create_endpoint_config"]
        assert found["create_model"]["VpcConfig"] == IN_VPC
        assert config["KmsKeyId"] == self.KEY
        assert config["AsyncInferenceConfig"]["OutputConfig"]["KmsKeyId"] == self.KEY
        assert "VpcConfig" not in config
        made = ("create_model", "create_endpoint_config", "create_endpoint")
        assert all(found[operation]["Tags"] == TAGS for operation in made)
        assert not any("Tags" in found[name] for name in found if name not in made)

    def test_disks_of_the_instance_itself_take_no_key(self, calls):
        found = calls("deploy", *self.GIVEN, instance="ml.trn1.32xlarge")
        assert "KmsKeyId" not in found["create_endpoint_config"]

    def test_inference_components(self, calls):
        found = calls("deploy", "--copies", "1", *self.GIVEN)
        assert found["create_endpoint_config"]["VpcConfig"] == IN_VPC
        assert found["create_inference_component"]["Tags"] == TAGS

    def test_a_compile(self, calls):
        job = calls("compile", *TestCompile.OUTPUT, *self.GIVEN)["create_processing_job"]
        assert job["NetworkConfig"] == {"VpcConfig": IN_VPC}
        assert job["ProcessingResources"]["ClusterConfig"]["VolumeKmsKeyId"] == self.KEY
        assert job["Tags"] == TAGS
        ami = ("--ami", "ami-1", "--instance-profile", "compile")
        machine = calls("compile", *TestCompile.OUTPUT, *ami, *self.GIVEN)["run_instances"]
        assert (machine["SubnetId"], machine["SecurityGroupIds"]) == ("subnet-1", ["sg-1"])
        (disk,) = machine["BlockDeviceMappings"]
        assert (disk["Ebs"]["Encrypted"], disk["Ebs"]["KmsKeyId"]) == (True, self.KEY)
        kinds = {one["ResourceType"]: one["Tags"] for one in machine["TagSpecifications"]}
        assert kinds == {"instance": TAGS, "volume": TAGS}

    def test_half_a_vpc(self, capsys, folder):
        given = arguments(folder("llama-3-8b"), "deploy", "--subnet", "subnet-1")
        assert "--security-group" in refused(capsys, *given)

    @pytest.mark.parametrize("name", ["execution", "compile", "deployer"])
    def test_rights_to_key_and_network_are_there_on_demand(self, name):
        plain = json.dumps(policy(name))
        assert not {"kms:", "NetworkInterface"} & {
            word for word in ("kms:", "NetworkInterface") if word in plain
        }
        statements = policy(name, "--kms-key", self.KEY, "--vpc")["Statement"]
        (key,) = [one for one in statements if "kms:Decrypt" in listed(one["Action"])]
        assert key["Resource"] == self.KEY
        in_vpc = [
            one for one in statements if "ec2:CreateNetworkInterface" in listed(one["Action"])
        ]
        assert len(in_vpc) == (name != "deployer")


@pytest.mark.parametrize(("tag", "warned"), [("nxdi", False), ("tnx-1.2", True), ("latest", False)])
def test_an_image_of_another_backend_is_named(folder, capsys, tag, warned):
    given = arguments(folder("llama-3-8b"), "deploy", instance="ml.inf2.8xlarge")
    given[given.index(IMAGE)] = IMAGE.replace(":nxdi", f":{tag}")
    assert deploy.main([*given, "--dry-run"]) == 0
    assert ("named for the backend tnx" in capsys.readouterr().err) == warned


class TestIsolated:
    def test_has_no_network(self, calls):
        assert calls("deploy", "--isolated", OPTION_COMPILATION="forbid")["create_model"][
            "EnableNetworkIsolation"
        ]
        assert (
            "EnableNetworkIsolation"
            not in calls("deploy", OPTION_COMPILATION="forbid")["create_model"]
        )

    @pytest.mark.parametrize(
        ("name", "value"),
        [("OPTION_COMPILED_GRAPH_PATH", "s3://models/graphs"), ("HF_MODEL_ID", "org/model")],
    )
    def test_fetches_nothing(self, capsys, folder, name, value):
        env = {"OPTION_COMPILATION": "forbid", name: value}
        given = arguments(folder("llama-3-8b"), "deploy", "--isolated", **env)
        assert name in refused(capsys, *given)


def test_the_calls_against_moto(moto, folder):
    env = {"OPTION_COMPILATION": "forbid"}
    given = arguments(folder("llama-3-8b"), "deploy", "--max-instances", "3", **env)
    assert deploy.main(given) == 0
    sagemaker = boto3.client("sagemaker", region_name=REGION)
    seen = sagemaker.describe_endpoint(EndpointName=NAME)
    assert (seen["EndpointStatus"], seen["EndpointConfigName"]) == ("InService", "chat-1")
    config = sagemaker.describe_endpoint_config(EndpointConfigName="chat-1")
    model = sagemaker.describe_model(ModelName=config["ProductionVariants"][0]["ModelName"])
    assert (env | ADDED).items() <= model["PrimaryContainer"]["Environment"].items()
    scaling = boto3.client("application-autoscaling", region_name=REGION)
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 3)
    (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    assert policy["PolicyType"] == "TargetTrackingScaling"
    cloudwatch = boto3.client("cloudwatch", region_name=REGION)
    body = cloudwatch.get_dashboard(DashboardName=NAME)["DashboardBody"]
    assert json.loads(body)["widgets"]

    assert deploy.main(arguments("", "delete", "--version", "1")) == 0
    assert sagemaker.list_endpoints()["Endpoints"] == []
    assert sagemaker.list_models()["Models"] == []
    assert sagemaker.list_endpoint_configs()["EndpointConfigs"] == []
    assert scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"] == []
    assert cloudwatch.list_dashboards()["DashboardEntries"] == []


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        ("llama-3-8b", ["ml.inf2.8xlarge"], "1 x 2 NeuronCores of ml.inf2.8xlarge, 16 slots, backend nxdi"),
        ("gpt2", ["ml.inf2.8xlarge"], "backend tnx"),
        ("llama-3-8b", ["ml.inf2.48xlarge", "--copies", "2"], "1 x 24 NeuronCores of ml.inf2.48xlarge"),
        ("llama-3-8b", ["ml.inf2.xlarge"], "30.4 GiB of the host's memory, and ml.inf2.xlarge has 16 GiB"),
    ],
)  # fmt: skip
def test_the_plan_is_shown(folder, capsys, model, words, expected):
    """Beside the calls, from which neither the library that the image needs nor the degree can be read."""
    given = arguments(folder(model), "deploy", *words[1:], instance=words[0])
    assert deploy.main([*given, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert expected in shown.err
    assert ("host's memory" in shown.err) == (words[0] == "ml.inf2.xlarge")
    assert json.loads(shown.out)


def test_what_lacks_something_is_an_error(moto, folder, monkeypatch, capsys):
    """Only what is to be deleted may be missing."""
    refuse(monkeypatch, "create_endpoint", 'Could not find endpoint configuration "chat-1".')
    given = arguments(folder("llama-3-8b"), "deploy", OPTION_COMPILATION="forbid")
    error = refused(capsys, *given)
    assert "deploy.sagemaker: sagemaker create_endpoint: " in error
    assert "Could not find endpoint configuration" in error


def test_a_refusal_shows_no_variables(moto, folder, monkeypatch, capsys):
    """They may be secrets, and what the command prints may be a log of CI."""
    refuse(monkeypatch, "create_model", "ResourceLimitExceeded")
    env = {"OPTION_COMPILATION": "forbid", "HF_TOKEN": "hf_secret"}
    error = refused(capsys, *arguments(folder("llama-3-8b"), "deploy", **env))
    assert "sagemaker create_model: " in error
    assert "ResourceLimitExceeded" in error
    assert "hf_secret" not in error


def test_without_credentials(monkeypatch, capsys, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    assert "credentials" in refused(capsys, *arguments("", "delete", "--version", "1"))


def test_the_commands_of_the_readme(tmp_path):
    """Its lines with `python -m deploy.sagemaker`, with the variables that it sets."""
    text = (Path(deploy.__file__).parent / "README.md").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r'^(\w+)="?(.*?)"?(?: +#.*)?$', text, re.MULTILINE))
    found = re.findall(r"^python -m deploy\.sagemaker (.*)$", text, re.MULTILINE)
    seen = set()
    for line in found:
        for _ in range(2):
            line = re.sub(r"\$(\w+)", lambda name: variables[name[1]], line)
        words = shlex.split(line.partition(">")[0], comments=True)
        seen.add(deploy.parser().parse_args(words).command)
    assert seen == {*deploy.COMMANDS, "policy"}


class Client:
    """A client whose `describe_…` gives one answer, or error, after the other."""

    def __init__(self, *answers):
        self._answers = list(answers)

    def describe_endpoint(self, EndpointName):  # noqa: N803
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class TestSettled:
    UNTIL = {"EndpointStatus": "InService", "EndpointConfigName": "chat-2"}  # noqa: RUF012
    CALL = aws.Call("sagemaker", "describe_endpoint", {"EndpointName": NAME}, UNTIL)

    def test_waits_for_the_service(self):
        states = ({"EndpointStatus": "Updating", "EndpointConfigName": "chat-1"}, self.UNTIL)
        client = Client(*states)
        aws.settle(client, self.CALL, pause_s=0)
        assert client._answers == []

    @pytest.mark.parametrize(
        "last",
        [
            {
                "EndpointStatus": "Failed",
                "EndpointConfigName": "chat-2",
                "FailureReason": "no ping",
            },
            # An update that was rolled back.
            {
                "EndpointStatus": "InService",
                "EndpointConfigName": "chat-1",
                "FailureReason": "no ping",
            },
        ],
    )
    def test_names_the_reason_of_a_failure(self, last):
        with pytest.raises(deploy.ServingError, match="no ping"):
            aws.settle(
                Client({**last, "EndpointStatus": "RollingBack"}, last), self.CALL, pause_s=0
            )

    def test_something_deleted_is_still_there(self):
        call = aws.Call("sagemaker", "describe_endpoint", {"EndpointName": NAME}, {})
        failed = {"EndpointStatus": "Failed", "EndpointConfigName": "chat-1"}
        deleting = {**failed, "EndpointStatus": "Deleting"}
        with pytest.raises(deploy.ServingError, match="found Failed"):
            aws.settle(Client(deleting, failed), call, pause_s=0)

    def test_an_inference_component_that_was_rolled_back(self, calls):
        given = arguments("", "update", "--version", "2", "--copies", "1")
        until = endpoint._component_settled(deploy.parser().parse_args(given)).until
        call = aws.Call("sagemaker", "describe_endpoint", {"EndpointName": NAME}, until)
        seen = {"InferenceComponentStatus": "InService", "Specification": {"ModelName": "chat-2"}}
        aws.settle(Client(seen), call, pause_s=0)
        with pytest.raises(deploy.ServingError, match="chat-2"):
            aws.settle(Client({**seen, "Specification": {"ModelName": "chat-1"}}), call, pause_s=0)


class TestDashboard:
    def test_has_every_metric(self, calls):
        body = json.loads(
            calls("deploy", OPTION_COMPILATION="forbid")["put_dashboard"]["DashboardBody"]
        )
        lines = [
            line for widget in body["widgets"] for line in widget["properties"].get("metrics", [])
        ]
        ours = [line for line in lines if line[0] == "djl-neuronx/chat"]
        shown = {line[1].removeprefix("djl_neuronx_") for line in ours}
        assert {tuple(line[2:4]) for line in ours} == {("model", "chat")}
        for name, row in METRICS.items():
            samples = {f"{name}_sum", f"{name}_count"} if row.kind == "histogram" else {name}
            assert samples <= shown
            shown -= samples
        assert shown == set()

    def test_widgets_lie_beside_each_other_within_the_grid(self, calls):
        body = json.loads(
            calls("deploy", OPTION_COMPILATION="forbid")["put_dashboard"]["DashboardBody"]
        )
        cells = set()
        for widget in body["widgets"]:
            assert widget["x"] + widget["width"] <= 24
            own = {
                (widget["x"] + dx, widget["y"] + dy)
                for dx in range(widget["width"])
                for dy in range(widget["height"])
            }
            assert not own & cells
            cells |= own


def policy(name, *more):
    words = ["policy", name, "--name", NAME, "--region", REGION, "--role", ROLE, "--image", IMAGE]
    words += ["--model-data", MODEL, "--output", "s3://answers/out"]
    return iam.policy(deploy.parser().parse_args([*words, *more]))


def listed(value):
    return [value] if isinstance(value, str) else value


class TestPolicies:
    NAMES = ("execution", "deployer", "compile")

    @pytest.mark.parametrize("name", NAMES)
    def test_iam_takes_it(self, name, monkeypatch):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        with mock_aws():
            document = json.dumps(policy(name))
            assert "${" not in document
            boto3.client("iam").create_policy(PolicyName=name, PolicyDocument=document)

    @pytest.mark.parametrize("name", NAMES)
    def test_everything_only_where_nothing_narrower_exists(self, name):
        for statement in policy(name)["Statement"]:
            actions, resources = listed(statement["Action"]), listed(statement["Resource"])
            assert statement["Effect"] == "Allow"
            assert not [action for action in actions if "*" in action]
            if "*" in resources and "Condition" not in statement:
                assert actions == ["ecr:GetAuthorizationToken"]

    def test_the_deployer_may_make_every_call(self, calls, folder):
        here, forbid = f"{REGION}:{ACCOUNT}", {"OPTION_COMPILATION": "forbid"}
        sagemaker, scaling = f"arn:aws:sagemaker:{here}", f"arn:aws:application-autoscaling:{here}"
        resources = {
            "CreateModel": f"{sagemaker}:model/chat-1",
            "CreateEndpointConfig": f"{sagemaker}:endpoint-config/chat-1",
            "CreateEndpoint": f"{sagemaker}:endpoint/chat",
            "DescribeEndpoint": f"{sagemaker}:endpoint/chat",
            "UpdateEndpoint": f"{sagemaker}:endpoint/chat",
            "DeleteEndpoint": f"{sagemaker}:endpoint/chat",
            "DeleteEndpointConfig": f"{sagemaker}:endpoint-config/chat-1",
            "DeleteModel": f"{sagemaker}:model/chat-1",
            "CreateInferenceComponent": f"{sagemaker}:inference-component/chat",
            "UpdateInferenceComponent": f"{sagemaker}:inference-component/chat",
            "DescribeInferenceComponent": f"{sagemaker}:inference-component/chat",
            "DeleteInferenceComponent": f"{sagemaker}:inference-component/chat",
            "CreateProcessingJob": f"{sagemaker}:processing-job/chat-1",
            "DescribeProcessingJob": f"{sagemaker}:processing-job/chat-1",
            "RegisterScalableTarget": f"{scaling}:scalable-target/0ec5",
            "DeregisterScalableTarget": f"{scaling}:scalable-target/0ec5",
            "PutScalingPolicy": f"{scaling}:scalable-target/0ec5",
            "PutMetricAlarm": f"arn:aws:cloudwatch:{here}:alarm:chat-from-zero",
            "DeleteAlarms": f"arn:aws:cloudwatch:{here}:alarm:chat-from-zero",
            "PutDashboard": f"arn:aws:cloudwatch::{ACCOUNT}:dashboard/chat",
            "DeleteDashboards": f"arn:aws:cloudwatch::{ACCOUNT}:dashboard/chat",
            "RunInstances": f"arn:aws:ec2:{here}:instance/i-0123456789abcdef0",
        }
        tnx = ("--ami", "ami-1", "--instance-profile", "compile", *TestCompile.OUTPUT)
        made = set()
        for found in (
            calls("deploy", "--max-instances", "2", **forbid),
            calls("deploy", "--copies", "1", "--max-copies", "2", **forbid),
            calls("update", "--version", "2", **forbid),
            calls("update", "--version", "2", "--copies", "1", **forbid),
            calls("compile", *TestCompile.OUTPUT),
            calls("compile", *tnx, OPTION_MODEL_LOADER="tnx"),
            {
                call.operation: 0
                for call in endpoint.delete(
                    deploy.parser().parse_args(arguments("", "delete", "--version", "1"))
                )
            },
        ):
            made |= found.keys()
        zero = ("--async-output", "s3://models/answers", "--min-instances", "0")
        given = arguments(folder("llama-3-8b"), "deploy", *zero, **forbid)
        made |= {call.operation for call in endpoint.deploy(deploy.parser().parse_args(given))}
        services = {name: get_session().get_service_model(name) for name in SERVICES}
        names = {
            xform_name(operation): (service, operation)
            for service, model in services.items()
            for operation in model.operation_names
        }
        statements = policy("deployer", "--compile-role", f"{ROLE}-compile")["Statement"]
        allowed = {action for statement in statements for action in listed(statement["Action"])}
        assert allowed - {":".join(names[operation]) for operation in made} == {
            "cloudwatch:DescribeAlarms",
            "iam:CreateServiceLinkedRole",
            "ec2:CreateTags",
            "iam:PassRole",
            "s3:GetObject",  # the plan
            "sagemaker:AddTags",
            "s3:ListBucket",
            # Source: SageMaker's developer guide, "Auto scaling prerequisites", and the policy
            # AWSApplicationAutoscalingSageMakerEndpointPolicy.
            "sagemaker:DescribeEndpointConfig",
            "sagemaker:UpdateEndpointWeightsAndCapacities",
            "sagemaker:UpdateInferenceComponentRuntimeConfig",
        }
        for operation in made:
            service, action = names[operation]
            resource = resources.pop(action)
            assert any(
                f"{service}:{action}" in listed(statement["Action"])
                and any(fnmatch.fnmatchcase(resource, one) for one in listed(statement["Resource"]))
                for statement in statements
            ), f"{service}:{action} on {resource}"
        assert resources == {}

    def test_without_a_compile_no_instance_is_started(self):
        text = json.dumps(policy("deployer"))
        assert "RunInstances" not in text
        assert "ec2.amazonaws.com" not in text
        assert text.count("iam:PassRole") == 1

    def test_roles_are_passed_to_their_services_only(self):
        passed = {
            statement["Resource"]: statement["Condition"]["StringEquals"]["iam:PassedToService"]
            for statement in policy("deployer", "--compile-role", f"{ROLE}-compile")["Statement"]
            if statement["Action"] == "iam:PassRole"
        }
        assert passed == {
            ROLE: "sagemaker.amazonaws.com",
            f"{ROLE}-compile": ["sagemaker.amazonaws.com", "ec2.amazonaws.com"],
        }

    @pytest.mark.parametrize(
        ("name", "action", "inside", "outside"),
        [
            (
                "execution",
                "s3:GetObject",
                "arn:aws:s3:::models/llama-3-8b/config.json",
                "arn:aws:s3:::models/other/config.json",
            ),
            (
                "execution",
                "s3:PutObject",
                "arn:aws:s3:::answers/out/1.out",
                "arn:aws:s3:::models/llama-3-8b/config.json",
            ),
            (
                "execution",
                "ecr:BatchGetImage",
                f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/djl-neuronx",
                f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/other",
            ),
            *(
                (
                    name,
                    "ecr:GetDownloadUrlForLayer",
                    f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/djl-neuronx",
                    f"arn:aws:ecr:us-west-2:{ACCOUNT}:repository/djl-neuronx",
                )
                for name in ("execution", "compile")
            ),
            *(
                (
                    "compile",
                    "s3:PutObject",
                    f"arn:aws:s3:::answers/out{written}",
                    "arn:aws:s3:::models/llama-3-8b/config.json",
                )
                for written in ("/manifest.json", ".log")
            ),
            (
                "compile",
                "logs:PutLogEvents",
                f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/ProcessingJobs:log-stream:chat-1/algo-1",
                f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/ProcessingJobs:log-stream:chatter-1/a",
            ),
            (
                "execution",
                "logs:PutLogEvents",
                f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/Endpoints/chat:log-stream:main/i-1",
                f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/Endpoints/chatter:log-stream:main/i-1",
            ),
        ],
    )
    def test_a_role_reaches_its_own_places(self, name, action, inside, outside):
        def allowed(resource):
            return any(
                action in listed(statement["Action"])
                and any(fnmatch.fnmatchcase(resource, one) for one in listed(statement["Resource"]))
                for statement in policy(name)["Statement"]
            )

        assert allowed(inside)
        assert not allowed(outside)

    @pytest.mark.parametrize(
        "place", ["s3://models", "s3://models/", "s3://models/*", "s3://models/model.tar.gz"]
    )
    def test_no_rights_to_a_whole_bucket(self, place):
        words = ["policy", "execution", "--name", NAME, "--region", REGION, "--role", ROLE]
        words += ["--image", IMAGE, "--model-data", place, "--output", "s3://answers/out"]
        with pytest.raises(deploy.ServingError, match="not s3://bucket/folder"):
            iam.policy(deploy.parser().parse_args(words))

    def test_each_place_in_s3(self):
        words = ["policy", "execution", "--name", NAME, "--region", REGION, "--role", ROLE]
        words += ["--image", IMAGE]

        def places(*more):
            found = iam.policy(deploy.parser().parse_args([*words, *more]))["Statement"]
            assert len({statement["Sid"] for statement in found}) == len(found)
            return {
                resource
                for statement in found
                for resource in listed(statement["Resource"])
                if ":s3:" in resource
            }

        assert places() == set()  # a model of the hub
        graphs = ("--model-data", "s3://models/a/model.tar.gz", "--model-data", "s3://graphs/b/")
        assert places(*graphs) == {
            "arn:aws:s3:::models",
            "arn:aws:s3:::models/a/*",
            "arn:aws:s3:::graphs",
            "arn:aws:s3:::graphs/b/*",
        }

    def test_a_compile_writes_somewhere(self):
        words = ["policy", "compile", "--name", NAME, "--region", REGION, "--role", ROLE]
        with pytest.raises(deploy.ServingError, match="give --output"):
            iam.policy(deploy.parser().parse_args([*words, "--image", IMAGE]))

    def test_an_image_of_another_registry(self):
        words = ["policy", "execution", "--name", NAME, "--region", REGION, "--role", ROLE]
        words += ["--image", "docker.io/x:1", "--model-data", MODEL, "--output", "s3://answers/out"]
        with pytest.raises(deploy.ServingError, match="not an image of ECR"):
            iam.policy(deploy.parser().parse_args(words))


SERVICES = ("sagemaker", "application-autoscaling", "cloudwatch", "ec2")
