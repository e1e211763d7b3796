"""The manifests: what Kubernetes and JobSet would refuse, and whether their parts agree."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

jsonschema = pytest.importorskip("jsonschema")
referencing = pytest.importorskip("referencing")

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts" / "launch"
SCHEMAS = {
    path.name: json.loads(path.read_text())
    for path in (Path(__file__).parent / "schemas").glob("*.json")
}
REGISTRY = referencing.Registry().with_resources(
    (name, referencing.Resource.from_contents(schema)) for name, schema in SCHEMAS.items()
)
MANIFESTS = sorted(LAUNCH.glob("*.yaml"))
# A variable that a manifest or the image sets, and the test in which a started run acts on it.
READ = {
    **dict.fromkeys(
        (
            "JOBSET_NAME",
            "COORDINATOR_ADDRESS",
            "NUM_PROCESSES",
            "JOB_COMPLETION_INDEX",
            "TRAIN_FILE",
            "OUTPUT_DIR",
            "WANDB_API_KEY",
            "WANDB_PROJECT",
            "HFSEQ_CACHE",
        ),
        "launch/test_jobset_run.py::test_the_pods_of_the_jobset_are_one_run",
    ),
    "HF_TOKEN": "training/test_push.py::test_a_run_pushes_everything_and_loads_back_by_name",
    "HF_HOME": "launch/test_image.py::test_the_environment_of_the_image_acts",
    "PYTHONUNBUFFERED": "launch/test_image.py::test_the_environment_of_the_image_acts",
    "PATH": "launch/test_image.py::test_the_environment_of_the_image_acts",
}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def problems(document: dict[str, Any]) -> list[str]:
    """What the schema of its kind says against a document."""
    kind = document.get("kind")
    file = next((name for name, schema in SCHEMAS.items() if kind in schema["$defs"]), None)
    if file is None:
        return [f"no schema for {kind}"]
    schema = {"$ref": f"{file}#/$defs/{kind}"}
    found = jsonschema.Draft202012Validator(schema, registry=REGISTRY).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


def pod_specs(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = document["spec"]
    for job in spec.get("replicatedJobs", []):
        yield job["template"]["spec"]["template"]["spec"]
    if document["kind"] == "Job":
        yield spec["template"]["spec"]
    if document["kind"] == "Pod":
        yield spec


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for path in MANIFESTS:
        for document in documents(path):
            for spec in pod_specs(document):
                for container in spec["containers"]:
                    yield path.name, spec, container


def test_the_schemas_are_schemas():
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        for target in re.findall(r'"\$ref": "([\w.]*)#/\$defs/(\w+)"', json.dumps(schema)):
            assert target[1] in SCHEMAS[target[0] or name]["$defs"], target


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_manifest_fits_its_schema(path):
    for document in documents(path):
        assert problems(document) == []


def jobset() -> dict[str, Any]:
    (found,) = documents(LAUNCH / "jobset.yaml")
    return copy.deepcopy(found)


def job(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]


def container(document: dict[str, Any]) -> dict[str, Any]:
    return job(document)["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d["spec"].update(replicas=2), "'replicas' was unexpected"),
        (lambda d: d["metadata"].pop("name"), "'name' is a required property"),
        (lambda d: d["metadata"].update(name="Not_A_Name"), "does not match"),
        (lambda d: d.update(apiVersion="batch/v1"), "v1alpha2' was expected"),
        (lambda d: job(d).update(completionMode="indexed"), "'indexed' is not one of"),
        (lambda d: job(d).update(completions="2"), "'2' is not of type 'integer'"),
        (lambda d: job(d)["template"]["spec"].update(restartPolicy="never"), "is not one of"),
        (lambda d: job(d)["template"]["spec"].update(container=[]), "'container' was unexpected"),
        (lambda d: container(d).pop("name"), "'name' is a required property"),
        (lambda d: container(d)["env"].append({"name": "N", "value": 2}), "2 is not of type"),
        (lambda d: container(d)["env"].append({"name": "N", "valueFrom": {}}), "non-empty"),
        (lambda d: container(d)["resources"].update(limit={}), "'limit' was unexpected"),
        (lambda d: container(d)["resources"]["limits"].update(memory="2 GB"), "does not match"),
        (lambda d: container(d).update(args="--device cuda"), "is not of type 'array'"),
        (lambda d: d["spec"]["failurePolicy"].update(maxRestarts=-1), "less than the minimum"),
    ],
)
def test_a_damaged_manifest_does_not_fit(damage: Callable[[dict], Any], message: str):
    document = jobset()
    damage(document)
    assert any(message in problem for problem in problems(document)), problems(document)


# -- their parts agree -----------------------------------------------------------------------------


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_the_workers_are_as_many_as_the_processes_and_find_the_first():
    document = jobset()
    (replicated,) = document["spec"]["replicatedJobs"]
    spec, env = job(document), environment(container(document))
    assert spec["parallelism"] == spec["completions"] == int(env["NUM_PROCESSES"])
    assert spec["completionMode"] == "Indexed" and replicated.get("replicas", 1) == 1
    assert document["spec"]["network"]["enableDNSHostnames"]
    host, port = env["COORDINATOR_ADDRESS"].split(":")
    name = env["JOBSET_NAME"]["fieldRef"]["fieldPath"]
    assert name == "metadata.annotations['jobset.sigs.k8s.io/jobset-name']"
    assert host == f"$(JOBSET_NAME)-{replicated['name']}-0-0.$(JOBSET_NAME)"
    assert {"containerPort": int(port)} in container(document)["ports"]
    # Kubernetes puts in what was defined before.
    assert [*env].index("JOBSET_NAME") < [*env].index("COORDINATOR_ADDRESS")


def test_indexed_job_uses_its_service():
    service, found = documents(LAUNCH / "indexed_job.yaml")
    spec, name = found["spec"], found["metadata"]["name"]
    env = environment(spec["template"]["spec"]["containers"][0])
    assert spec["parallelism"] == spec["completions"] == int(env["NUM_PROCESSES"])
    assert spec["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert env["COORDINATOR_ADDRESS"] == f"{name}-0.{service['metadata']['name']}:1234"


def test_secrets_are_not_in_manifests():
    for name, _, found in containers():
        for variable, value in environment(found).items():
            if re.search("KEY|TOKEN|SECRET|PASSWORD", variable):
                assert value["secretKeyRef"]["name"] == "hfseq-secrets", (name, variable)
                assert value["secretKeyRef"]["optional"]


def test_volumes_exist_and_outlive_pods():
    (claim,) = documents(LAUNCH / "storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name, spec, found in containers():
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
        assert mounts.keys() == volumes.keys(), name
        assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert environment(found)["OUTPUT_DIR"].startswith(mounts["data"] + "/")


def test_commands_and_flags_exist():
    from hfseq.training.arguments import ARGUMENT_CLASSES, flag_names

    for name, spec, found in containers():
        assert found["command"][0] == "bash" and (ROOT / found["command"][1]).is_file()
        flags = {word[2:] for word in found["args"] if word.startswith("--")}
        assert flags <= flag_names(ARGUMENT_CLASSES), name
        # SIGTERM saves within the grace, and is no success that would end the Job.
        assert spec["terminationGracePeriodSeconds"] >= 60
        assert found["args"][found["args"].index("--sigterm_exit_code") + 1] == "143"
        assert found["image"] == "hfseq:cuda"  # what `gke_cluster.sh submit` replaces


def test_wrong_flags_are_not_started_again():
    from hfseq.errors import UsageError

    for spec in (job(jobset()), documents(LAUNCH / "indexed_job.yaml")[1]["spec"]):
        (rule,) = spec["podFailurePolicy"]["rules"]
        (found,) = spec["template"]["spec"]["containers"]
        assert rule["onExitCodes"]["values"] == [UsageError.exit_code]
        assert rule["onExitCodes"]["containerName"] == found["name"]
        assert rule["action"] == "FailJob" and spec["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = jobset()["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"] and rule["action"] == "FailJobSet"


@pytest.mark.slow
def test_every_variable_is_read_by_a_run_in_a_test():
    used = {variable for _, _, found in containers() for variable in environment(found)}
    for line in re.findall(r"^ENV (.*?)$(?<!\\)", dockerfile(), flags=re.M):
        used |= {part.partition("=")[0] for part in line.split()}
    assert used | {"JOB_COMPLETION_INDEX"} == READ.keys()
    for test in READ.values():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), test


def dockerfile() -> str:
    return re.sub(r"\\\n\s*", "", (LAUNCH / "Dockerfile").read_text())
