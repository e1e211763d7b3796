"""Compares the cloud commands of the reference guides with those of the launch scripts."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.launch.test_launch_scripts import ROOT, prints

#: Values of the placeholders of the guides, and the variables of our scripts that have them.
VALUES = {
    **{"VM_NAME": "wmt", "TPU_POD_SLICE_NAME": "wmt", "ZONE": "us-central1-a"},
    **{"TPU_TYPE": "v3-8", "SLICE_TYPE": "v3-32", "TPU_SOFTWARE_VERSION": "tpu-ubuntu2204-base"},
    **{"BUCKET_NAME": "b", "LOCATION": "us-central1", "WORKER_ID": "3", "PROJECT_ID": "p"},
    **{"GCS_TFDS_BUCKET": "b", "REPO": "https://example.org/r", "VERSION": "v0.6.0"},
}
TPU = {"TPU_NAME": "wmt", "ZONE": "us-central1-a", "PROJECT_ID": ""}
SWITCHES = {"--uniform-bucket-level-access", "--public-access-prevention", "--server-side"}
SWITCHES |= {"--preemptable", "--spot", "--quiet", "--rm"}

# Reasons for differences.
ALPHA = "`tpu-vm` has left the alpha release of gcloud"
QUIET = "the script does not ask for a confirmation"
PYTHON = "v2-alpha has Python 3.8, and hfseq needs Python 3.11"
SPOT = "gcloud has no --preemptable, and unlike --preemptible, --spot has no time limit"
WORKER = "worker 0 is the default of gcloud"
REMOTE = "the steps of the remote command are compared below"
STDIN = "the script writes the name of the image into the manifest and sends it on standard input"


@dataclass
class Case:
    """A command of a guide, the call of our script, and the reason of each difference."""

    guide: str
    call: str
    variables: dict[str, str] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)


CREATE = "gcloud alpha compute tpus tpu-vm create $VM_NAME --zone $ZONE"
ON_ALL = "gcloud compute tpus tpu-vm ssh TPU_POD_SLICE_NAME --zone ZONE --worker=all --command"
CASES = [
    # Flax: the WMT example
    Case(
        f"{CREATE} --accelerator-type $TPU_TYPE --version v2-alpha",
        "tpu.sh create",
        {"TPU_TYPE": "v3-8"},
        {"alpha": ALPHA, "--version": PYTHON},
    ),
    Case(
        f"{CREATE} --version v2-alpha --accelerator-type v3-32",
        "tpu.sh create",
        {"TPU_VERSION": "v2-alpha"},
        {"alpha": ALPHA},
    ),
    Case(
        "gcloud alpha compute tpus tpu-vm ssh $VM_NAME --zone $ZONE -- -L 6006:localhost:6006",
        "tpu.sh ssh -- -L 6006:localhost:6006",
        {},
        {"alpha": ALPHA, "--worker": WORKER},
    ),
    *(
        Case(
            "gcloud alpha compute tpus tpu-vm ssh $VM_NAME --zone $ZONE --worker=all --command …",
            call,
            {},
            {"alpha": ALPHA, "--command": REMOTE},
        )
        for call in ("tpu.sh install", "tpu.sh run scripts/run_translation_flax.py")
    ),
    Case(
        "gcloud alpha compute tpus tpu-vm delete $VM_NAME --zone $ZONE",
        "tpu.sh delete",
        {},
        {"alpha": ALPHA, "--quiet": QUIET},
    ),
    # Transformer-VQ
    Case(
        "gcloud storage buckets create gs://BUCKET_NAME --location=LOCATION "
        "--uniform-bucket-level-access --public-access-prevention",
        "tpu.sh bucket",
    ),
    Case(
        "gcloud compute tpus tpu-vm create TPU_POD_SLICE_NAME --zone ZONE "
        "--accelerator-type SLICE_TYPE --version TPU_SOFTWARE_VERSION --preemptable",
        "tpu.sh create",
        {"SPOT": "1"},
        {"--preemptable": SPOT, "--spot": SPOT},
    ),
    *(
        Case(f"{ON_ALL}=…", call, {}, {"--command": REMOTE})
        for call in ("tpu.sh install", "tpu.sh run scripts/run_clm_flax.py", "tpu.sh stop")
    ),
    Case(
        "gcloud compute tpus tpu-vm ssh TPU_POD_SLICE_NAME --zone ZONE --worker=WORKER_ID",
        "tpu.sh ssh",
        {"WORKER": "3"},
    ),
    Case(
        "gcloud compute tpus tpu-vm delete TPU_POD_SLICE_NAME --zone ZONE",
        "tpu.sh delete",
        {},
        {"--quiet": QUIET},
    ),
    # Translate AI
    Case(
        "kubectl apply --server-side -f "
        "https://github.com/kubernetes-sigs/jobset/releases/download/$VERSION/manifests.yaml",
        "gke_cluster.sh jobset",
        {"JOBSET_VERSION": "v0.6.0"},
    ),
    Case(
        "kubectl apply -f jobset.yaml",
        "gke_cluster.sh submit scripts/launch/jobset.yaml",
        {},
        {"--filename": STDIN},
    ),
]


def fill_in(text: str) -> str:
    """Replaces the placeholders of a guide."""
    return re.sub(r"\$?\b[A-Z][A-Z_]+\b", lambda m: VALUES.get(m[0].strip("$"), m[0]), text)


def parse(words: list[str]) -> dict[str, Any]:
    """Returns the flags of a command, its other words, and the arguments of ssh after `--`."""
    end = words.index("--") if "--" in words else len(words)
    parsed: dict[str, Any] = {"--": words[end:], "alpha": "alpha" in words, "words": []}
    rest = iter(words[:end])
    for word in rest:
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            parsed["words"] += [word] * (word != "alpha")
        elif flag in SWITCHES:
            parsed[flag] = True
        else:
            parsed["--filename" if flag == "-f" else flag] = value if equals else next(rest)
    return parsed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.call)
def test_commands_differ_from_those_of_the_guides_only_for_a_reason(case):
    guide = parse(shlex.split(fill_in(case.guide)))
    ours = parse(prints(*shlex.split(case.call), **(TPU | case.variables))[-1])
    differences = {key for key in guide | ours if guide.get(key) != ours.get(key)}
    assert differences == set(case.differences), (guide, ours)


# Each step of the commands that the guides run on all hosts, with our call and the same step in its
# output, or with the reason why there is no such step.
INSTALL = "tpu.sh install"
FLAGS = "--output_dir gs://b/wmt --max_steps 25000 --warmup_steps 250 --save_steps 2500"
TRAIN = f"tpu.sh run scripts/run_translation_flax.py configs/wmt17.yaml {FLAGS}"
STEPS = [
    # Flax: the WMT example
    ("set -x", None, "a failing step ends the command with its own message"),
    ("pip install 'jax[tpu]>=0.2.21' -f …", INSTALL, "pip install -e 'hfseq[tpu,wandb]'"),
    ("pip install --user git+$REPO.git", None, "one installation, that of the checkout, is enough"),
    (
        "(test -d flax || git clone --depth=1 -b $BRANCH $REPO)",
        INSTALL,
        "(test -d hfseq || git clone $REPO hfseq)",
    ),
    ("cd flax", TRAIN, "cd hfseq; "),
    ("pip install -e .", INSTALL, "pip install -e 'hfseq[tpu,wandb]'"),
    ("cd examples/wmt", None, "the paths of scripts are relative to the checkout"),
    ("pip install -r requirements.txt", None, "the dependencies are those of the package"),
    (
        "export TFDS_DATA_DIR=gs://$GCS_TFDS_BUCKET/datasets",
        TRAIN,
        "export TFDS_DATA_DIR=gs://$GCS_TFDS_BUCKET/datasets; ",
    ),
    (
        "python3 main.py --workdir=$WORKDIR --config=configs/default.py $FLAGS",
        TRAIN,
        f"hfseq-env/bin/python scripts/run_translation_flax.py configs/wmt17.yaml {FLAGS}",
    ),
    # Transformer-VQ
    (
        "git clone https://github.com/transformer-vq/transformer_vq/",
        INSTALL,
        "git clone $REPO hfseq",
    ),
    ("pip3 install -e '.[tpu]' -f …", INSTALL, "pip install -e 'hfseq[tpu,wandb]'"),
    ("tmux new-session -d -s transformer_vq_session …", TRAIN, "tmux new-session -d -s hfseq "),
    ("cd transformer_vq", TRAIN, "cd hfseq; "),
    ("export WANDB_API_KEY=WB_KEY", TRAIN, ". ../.hfseq-secrets"),  # not on a command line
    ("python3 ./scripts/launch.py …", TRAIN, "exec ../hfseq-env/bin/python scripts/"),
    # The signal ends the session, too, but the run saves a checkpoint first.
    (
        "tmux kill-session -t transformer_vq_session",
        "tpu.sh stop",
        "kill -TERM $(tmux list-panes -s -t hfseq",
    ),
]


@pytest.mark.parametrize(
    ("guide", "call", "ours"), [step for step in STEPS if step[1]], ids=lambda value: value[:30]
)
def test_the_hosts_run_the_steps_of_the_guides(guide, call, ours):
    variables = TPU | {"REPOSITORY": VALUES["REPO"], "TFDS_DATA_DIR": "gs://b/datasets"}
    command = prints(*shlex.split(call), **variables)[-1][-1]
    assert fill_in(ours) in command.replace("\\", ""), guide


CONFIGURE_PROJECT = "gcloud config set project p"


def test_project_replaces_the_configuration_of_gcloud():
    """Compares with `gcloud config set project` in the guide of Transformer-VQ."""
    calls = [case.call for case in CASES] + ["tpu.sh log", "tpu.sh secrets"]
    calls += [f"gke_cluster.sh {command}" for command in ("create", "delete")]
    for name in ("PROJECT", "PROJECT_ID"):
        for call in calls:
            for command in prints(*shlex.split(call), **({"PROJECT_ID": ""} | {name: "mine"})):
                assert command[0] != "gcloud" or parse(command)["--project"] == "mine", call
    for command in prints("tpu.sh", "create", PROJECT_ID=""):
        assert "--project" not in command


def test_image_and_cluster_are_those_of_the_guide():
    """Compares with build_and_push.sh and create_cluster.sh in the guide of Translate AI."""
    names = "PROJECT_ID=your-gcp-project REPO_NAME=your-ar-repo IMAGE_NAME=translate TAG=latest"
    variables = dict(pair.split("=") for pair in names.split()) | {"IMAGE": ""}
    build, push = prints("image.sh", **variables)
    image = "us-central1-docker.pkg.dev/your-gcp-project/your-ar-repo/translate:latest"
    assert parse(build)["--tag"] == image and push == ["docker", "push", image]
    create, pool, _ = map(parse, prints("gke_cluster.sh", "create", CLUSTER="demo"))
    assert create["words"][-1] == pool["--cluster"] == "demo"
    assert create["--zone"] == pool["--zone"] == "us-central1-c"
    assert pool["words"][-1] == "gpu-pool" and pool["--num-nodes"] == "2"
    assert pool["--machine-type"] == "n1-standard-4"
    assert pool["--accelerator"].startswith("type=nvidia-tesla-t4,count=1,")


RUN_CONTAINER = "docker run --gpus=all --ipc=host ..."


def test_the_documented_docker_command_has_the_flags_of_the_guide():
    """Compares with the guide of Transformer Engine."""
    page = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^docker run .*--gpus.*", page, flags=re.M)
    documented, guide = (parse(text.strip("\\").split()) for text in (command, RUN_CONTAINER))
    for flag in ("--gpus", "--ipc"):
        assert documented[flag] == guide[flag]


def test_every_cloud_command_of_the_guides_is_compared(shared):
    folder = shared.parent / "references"
    if not folder.is_dir():
        pytest.skip(f"no guides at {folder}")
    compared = [parse(shlex.split(fill_in(case.guide))) for case in CASES]
    compared += [parse(words.split()) for words in (CONFIGURE_PROJECT, RUN_CONTAINER)]
    for path in sorted(folder.glob("*.md")):
        text = re.sub(r"\\ *\n\s*", " ", path.read_text(encoding="utf-8"))
        for line in re.findall(r"^\s*((?:gcloud|kubectl|docker) .+)", text, flags=re.M):
            # The steps of remote commands are compared separately, and brackets mark options.
            line = re.sub(r"--command[= ].*", "--command=…", line).replace("[", "").replace("]", "")
            assert parse(shlex.split(fill_in(line))) in compared, (path.name, line)
