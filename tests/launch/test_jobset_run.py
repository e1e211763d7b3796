"""The commands of the launch files, started as Kubernetes, Slurm and TPU hosts start them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfseq.cli.launch import free_port
from tests.launch.test_launch_scripts import stub
from tests.support import machines
from tests.training.conftest import losses

LAUNCH = machines.ROOT / "scripts" / "launch"
# Put behind a template's flags they make its run a tiny one on CPUs.
TINY = shlex.split(
    "--device cpu --precision float32 --do_train --max_steps 3 --logging_steps 1 --warmup_steps 0 "
    "--vocab_size 300 --max_source_length 16 --max_target_length 16 --global_batch_size 8 "
    "--compilation_cache_dir none --heartbeat_timeout 600 --config_overrides d_model=16,"
    "encoder_layers=1,decoder_layers=1,encoder_ffn_dim=32,decoder_ffn_dim=32,"
    "encoder_attention_heads=2,decoder_attention_heads=2,max_position_embeddings=32"
)
WANDB = """\
import json, os, pathlib

class Run:
    def log(self, *_, **__): pass
    def finish(self): pass

def init(project, dir, **_):
    seen = {"project": project, "key": os.environ["WANDB_API_KEY"]}
    (pathlib.Path(dir) / "wandb").mkdir()
    (pathlib.Path(dir) / "wandb" / "seen.json").write_text(json.dumps(seen))
    return Run()
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The volume of the pods: a file of sentence pairs, and room for the rest."""
    folder = tmp_path / "data"
    folder.mkdir()
    words = "law land read live know every some yet who there".split()
    pairs = [f"the {a} of {b},la {a}a de {b}o" for a in words for b in words if a != b]
    (folder / "english-spanish.csv").write_text("\n".join(["en,es", *pairs]) + "\n")
    return folder


def pod(manifest: str, kind: str) -> dict[str, Any]:
    """The pod that a manifest describes."""
    found = next(
        d for d in yaml.safe_load_all((LAUNCH / manifest).read_text()) if d["kind"] == kind
    )
    if kind == "JobSet":
        found = found["spec"]["replicatedJobs"][0]["template"]
    return found if kind == "Pod" else found["spec"]["template"]


def variables(container: dict, annotations: dict, secrets: dict) -> dict[str, str]:
    """The environment of a container, made as the kubelet makes it."""
    made: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", source["fieldRef"]["fieldPath"])
            made[entry["name"]] = annotations[key[1]]
        elif "secretKeyRef" in source:
            if source["secretKeyRef"]["key"] in secrets:
                made[entry["name"]] = secrets[source["secretKeyRef"]["key"]]
        else:
            known = re.compile(r"\$\((\w+)\)")
            made[entry["name"]] = known.sub(lambda m: made[m[1]], entry["value"])
    return made


def flags_of(folder: Path, environment: dict[str, str], *given: str) -> list[str]:
    """The flags that train.sh gives to its script."""
    dry = environment | {"DRY_RUN": "1"}
    done = subprocess.run(
        ["bash", str(LAUNCH / "train.sh"), *given], env=dry, text=True, capture_output=True
    )
    return shlex.split(done.stdout)[2:]


@pytest.mark.slow
def test_the_pods_of_the_jobset_are_one_run(data, tmp_path):
    """Two pods, each with its own name and address (as root): the losses are one process's."""
    import jax

    from hfseq.training.arguments import parse
    from hfseq.training.run import main

    container = pod("jobset.yaml", "JobSet")["spec"]["containers"][0]
    annotations = {"jobset.sigs.k8s.io/jobset-name": "hfseq"}
    env = variables(container, annotations, {"WANDB_API_KEY": "k3y"})
    extra = tmp_path / "modules"
    # Files at /data are on this volume here; HFSEQ_CACHE is the Dockerfile's.
    own = env | {"HFSEQ_CACHE": "/data/cache", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    own = {name: re.sub("^/data", str(data), value) for name, value in own.items()}
    command = [*container["command"], *container["args"], *TINY]
    command[1] = str(machines.ROOT / command[1])

    def run(prefixes: list[list[str]], **changes: str) -> None:
        (extra / "wandb.py").parent.mkdir(exist_ok=True)
        (extra / "wandb.py").write_text(WANDB)
        running = [
            machines.start(
                [*prefix, *command],
                machines.environment(extra, JOB_COMPLETION_INDEX=index, **(own | changes)),
            )
            for index, prefix in enumerate(prefixes)
        ]
        texts = machines.wait_for_all(running, 0)
        assert "kubernetes` package" not in "".join(texts)

    if machines.missing_requirements():
        run([[], []], COORDINATOR_ADDRESS=f"localhost:{free_port()}")
    else:
        # What the controller calls pods, and the service through which they are found.
        names = [f"hfseq-worker-0-{index}" for index in (0, 1)]
        with machines.Machines([f"{name} {name}.hfseq" for name in names]) as made:
            run([made.command_prefix(index) for index in (0, 1)])

    out = data / "runs" / "english-spanish"
    alone = flags_of(extra, machines.environment(extra, **own), *container["args"], *TINY)
    again = ["--output_dir", str(tmp_path / "one"), "--report_to", "jsonl"]
    arguments = parse(alone + again, objective="translation")
    main(arguments, "translation", devices=jax.devices()[:2])
    one, two = losses(tmp_path / "one"), losses(out)
    assert one.keys() == two.keys() == {1, 2, 3}
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5
    assert json.loads((out / "wandb" / "seen.json").read_text()) == {
        "project": "hfseq",
        "key": "k3y",
    }
    assert any((data / "cache").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("manifest", "kind"), [("indexed_job.yaml", "Job"), ("pod.yaml", "Pod")])
def test_the_pods_of_the_other_manifests_train(data, tmp_path, manifest, kind):
    container = pod(manifest, kind)["spec"]["containers"][0]
    env = variables(container, {}, {})
    count = int(env.get("NUM_PROCESSES", 1))
    if count > 1:
        env["COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
    env = {name: re.sub("^/data", str(data), value) for name, value in env.items()}
    command = [*container["command"], *container["args"], *TINY, "--report_to", "jsonl"]
    command[1] = str(machines.ROOT / command[1])
    machines.wait_for_all(
        [
            machines.start(
                command, machines.environment(tmp_path / "m", JOB_COMPLETION_INDEX=index, **env)
            )
            for index in range(count)
        ],
        0,
    )
    assert losses(data / "runs" / "english-spanish").keys() == {1, 2, 3}


SRUN = f"""\
#!{sys.executable}
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = [
    subprocess.Popen(command, env=os.environ | {{
        "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": str(number),
        "SLURM_PROCID": str(number), "SLURM_STEP_NUM_NODES": "1"}})
    for number in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.slow
@pytest.mark.parametrize("template", ["train", "perf"])
def test_the_batch_file_of_slurm_starts_one_run(data, tmp_path, template):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "srun").write_text(SRUN)
    (bin_ / "srun").chmod(0o755)
    # jax derives the coordinator's port from the job's number.
    env = machines.environment(
        tmp_path / "m",
        TEMPLATE=template,
        SLURM_JOB_ID=4000 + os.getpid() % 90,
        SLURM_SUBMIT_DIR=machines.ROOT,
        PATH=f"{bin_}:{os.environ['PATH']}",
        TRAIN_FILE=data / "english-spanish.csv",
        OUTPUT_DIR=data / "out",
        http_proxy="nowhere:1",
        PEAK_TFLOPS="0.5",
    )
    few = ["--max_steps", "3", "--profile", "1-2"] if template == "perf" else []
    command = ["bash", str(LAUNCH / "slurm.sbatch"), *TINY, "--report_to", "jsonl", *few]
    (text,) = machines.wait_for_all([machines.start(command, env)], 0)
    assert losses(data / "out").keys() == {1, 2, 3}
    if template == "perf":
        assert re.search(r"^train_mfu +[\d.e-]+$", text, flags=re.M)
        assert re.search(r"^train_tokens_per_second +[\d.e+]+$", text, flags=re.M)
        assert any((data / "out" / "profile").rglob("*.xplane.pb"))


BUCKET = """
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Bucket(LocalFileSystem):
    protocol = ("gs",)

    def __init__(self, **options):
        super().__init__(**options | {"auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).replace("gs://", "ROOT/"))

fsspec.register_implementation("gs", Bucket, clobber=True)
"""


@pytest.mark.slow
def test_the_hosts_of_a_slice_write_a_bucket_through_their_share(data, tmp_path):
    """Two hosts with separate home directories. The second run only has the files of the bucket."""
    bin_, share, bucket = tmp_path / "bin", tmp_path / "share", tmp_path / "bucket"
    stub(bin_ / "tmux", 'exec "${@:5}"')
    environment = machines.environment(
        tmp_path / "modules",
        DRY_RUN=1,
        SHARE="10.0.0.2:/share",
        TPU_TYPE="v3-32",
        PATH=f"{bin_}:{os.environ['PATH']}",
        TRAIN_FILE=data / "english-spanish.csv",
        OUTPUT_DIR="gs://b/run",
    )
    with open(tmp_path / "modules" / "sitecustomize.py", "a") as file:
        file.write(BUCKET.replace("ROOT", str(bucket)))
    for number in range(2):
        home = tmp_path / f"host{number}"
        (home / "hfseq").mkdir(parents=True)
        (home / "hfseq" / "scripts").symlink_to(machines.ROOT / "scripts")
        stub(home / "hfseq-env/bin/python", f'exec {sys.executable} "$@" --device cpu')

    def run(steps: int) -> str:
        flags = flags_of(
            data, environment, *TINY, "--report_to", "jsonl", "--max_steps", str(steps)
        )
        words = ["bash", str(LAUNCH / "tpu.sh"), "run", "scripts/run_translation_flax.py", *flags]
        dry_run = subprocess.run(words, env=environment, text=True, capture_output=True, check=True)
        command = shlex.split(dry_run.stdout)[-1].removeprefix("--command=")
        command = command.replace("/mnt/hfseq", str(share))
        address = f"localhost:{free_port()}"
        running = [
            machines.start(
                ["bash", "-c", f"cd && {command}"],
                environment
                | {"HOME": str(tmp_path / f"host{number}"), "PROCESS_ID": str(number)}
                | {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": "2"},
            )
            for number in range(2)
        ]
        try:
            machines.wait_for_all(running, 0)
        finally:
            log = (tmp_path / "host0" / "hfseq.log").read_text()
            print(log)
        return log

    run(2)
    assert losses(bucket / "b" / "run").keys() == {1, 2}
    shutil.rmtree(share)
    assert "resumed from step 2 of gs://b/run" in run(3)
    assert losses(bucket / "b" / "run").keys() == {1, 2, 3}


@pytest.mark.slow
def test_a_job_that_ran_out_of_time_is_queued_again(tmp_path):
    for name, text in (
        ("srun", "#!/bin/sh\nexit 143\n"),
        ("scontrol", f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = os.environ | {
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(machines.ROOT),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    assert subprocess.run(["bash", str(LAUNCH / "slurm.sbatch")], env=env).returncode == 143
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
