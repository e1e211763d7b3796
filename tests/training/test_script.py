"""Startup of a training script: it restarts itself if huge pages are available."""

import os
import subprocess
import sys

import pytest

from hfseq.training import script

PROGRAM = """
import os, sys
from hfseq.training import script

def main():
    assert "jax" not in sys.modules
    print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:])

if __name__ == "__main__":
    script.HUGE_PAGES_FILE = script.Path(os.environ["ENABLED"])
    script.platform.libc_ver = lambda: ("glibc", "2.41")
    sys.exit(script.run(main))
"""


@pytest.fixture
def enabled(tmp_path, monkeypatch):
    """The setting `madvise` in a file, as in Linux, and a sufficiently new glibc."""
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    monkeypatch.setattr(script, "HUGE_PAGES_FILE", path)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.41"))
    return path


def run(tmp_path, enabled, *prefix_lines, **environ):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    process = subprocess.Popen(
        [sys.executable, *prefix_lines, str(program), "--name", "a b"],
        env={**environment, "ENABLED": str(enabled), **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return process.pid, out.strip()


def test_script_restarts_with_the_same_arguments(tmp_path, enabled):
    pid, out = run(tmp_path, enabled)
    assert out == f"{pid} glibc.malloc.hugetlb=1 ['--name', 'a b']"
    pid, out = run(tmp_path, enabled, "-X", "utf8", "-W", "error")
    assert out == f"{pid} glibc.malloc.hugetlb=1 ['--name', 'a b']"


@pytest.mark.parametrize("choice", ["glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=2"])
def test_user_setting_is_respected(tmp_path, enabled, choice):
    _, out = run(tmp_path, enabled, GLIBC_TUNABLES=choice)
    assert choice in out
    assert script.with_huge_pages({"GLIBC_TUNABLES": choice}) is None


def test_traced_script_is_not_restarted(tmp_path, enabled):
    _, out = run(tmp_path, enabled, "-m", "cProfile", "-s", "time")
    assert " None ['--name', 'a b']" in out


def test_other_tunables_are_kept(enabled):
    environ = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1", "HOME": "/"}
    assert script.with_huge_pages(environ) == {
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1",
        "HOME": "/",
    }


@pytest.mark.parametrize("text", ["[always] madvise never\n", "always madvise [never]\n"])
def test_no_restart_if_huge_pages_are_always_or_never(enabled, text):
    enabled.write_text(text)
    assert script.with_huge_pages({}) is None
    enabled.unlink()
    assert script.with_huge_pages({}) is None


def test_other_allocators_are_respected(enabled):
    assert script.with_huge_pages({"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"}) is None
    assert script.with_huge_pages({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.mark.parametrize(
    ("libc_version", "able"),
    [
        (("glibc", "2.35"), True),
        (("glibc", "2.41.1"), True),
        (("glibc", "3.0"), True),
        (("glibc", "2.34"), False),
        (("glibc", "unknown"), False),
        (("", ""), False),
    ],
)
def test_restart_requires_a_glibc_with_the_tunable(enabled, monkeypatch, libc_version, able):
    monkeypatch.setattr("platform.libc_ver", lambda: libc_version)
    assert (script.with_huge_pages({}) is not None) is able


def test_only_the_main_program_restarts():
    assert script.is_main_program(["run.py", "--a"], ["python", "-X", "dev", "run.py", "--a"])
    assert not script.is_main_program(["run.py", "--a"], ["python", "-m", "pytest", "tests"])
    assert not script.is_main_program(["run.py"], ["python", "-m", "ipykernel_launcher", "-f"])
