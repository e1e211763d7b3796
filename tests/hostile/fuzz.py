"""Fuzzes file readers, guided by the code coverage of hfseq (atheris, libFuzzer).

    pip install atheris
    python tests/hostile/fuzz.py safetensors --seconds 60
    python tests/hostile/fuzz.py all --seconds 60

The subjects are those of `tests.hostile.subjects` that take at most about a millisecond. One file
is mutated, the others are unchanged. A finding (an unexpected exception, more than 5 s or more than
2 GB) ends the run and prints the name of the file. docs/security.md lists the runs so far.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "safetensors", "index", "msgpack", "store", "store-header", "tfrecord", "tfds-info",
    "pairs-jsonl", "pairs-csv", "pairs-aligned", "examples-jsonl", "examples-tsv", "arrays", "log",
    "arguments",
)  # fmt: skip


def main() -> int:
    """Fuzzes one subject in this process, or each subject in a separate process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("subject", choices=(*QUICK, "all"))
    parser.add_argument("--seconds", type=int, default=60, help="Seconds per subject. Default: 60.")
    parser.add_argument(
        "--seed", type=int, default=1, help="Random seed of the mutations. Default: 1."
    )
    arguments = parser.parse_args()
    if arguments.subject == "all":
        options = [f"--seconds={arguments.seconds}", f"--seed={arguments.seed}"]
        codes = [subprocess.call([sys.executable, __file__, name, *options]) for name in QUICK]
        return max(codes)
    fuzz(arguments.subject, arguments.seconds, arguments.seed)
    return 0


def fuzz(name: str, seconds: int, seed: int) -> None:
    """Fuzzes until the time limit; libFuzzer ends the process."""
    import atheris

    sys.path[:0] = [str(ROOT), str(ROOT / "plugins")]
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[variable] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    with atheris.instrument_imports(include=["hfseq"]):
        import hfseq.checkpoints.files
        import hfseq.data.classification
        import hfseq.data.parallel
        import hfseq.data.sources
        import hfseq.data.tfds
        import hfseq.training.arguments
        import hfseq.training.trackers  # noqa: F401
    from hfseq.errors import HfseqError
    from tests.hostile import subjects

    root = Path(
        tempfile.mkdtemp(
            prefix="hfseq-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        )
    )
    subject = subjects.make(name, root / "made")
    subject.write_files(root / "case")
    subject.load(root / "case")
    corpus = root / "corpus"
    corpus.mkdir()
    for mutated in subject.mutated:
        (corpus / mutated.replace("/", "-")).write_bytes(subject.files[mutated])
    target = root / "case" / subject.mutated[0]
    counted, started = [0, 0], time.monotonic()

    def one(data: bytes) -> None:
        target.write_bytes(data)
        counted[0] += 1
        with no_output():
            try:
                subject.load(root / "case")
            except (HfseqError, OSError):
                counted[1] += 1
        if time.monotonic() - started > seconds:
            refused, count = counted[1], counted[0]
            print(f"{name}: {count} executions, {refused} refused, no finding", flush=True)
            os._exit(0)

    findings = Path(tempfile.gettempdir()) / f"hfseq-finding-{name}-"
    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-seed={seed}",
            "-timeout=5",
            "-rss_limit_mb=2048",
            "-max_len=65536",
            f"-artifact_prefix={findings}",
            "-verbosity=0",
            "-print_final_stats=0",
        ],
        one,
    )
    atheris.Fuzz()


@contextlib.contextmanager
def no_output():
    """Suppresses the output of the flag parser."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


if __name__ == "__main__":
    sys.exit(main())
