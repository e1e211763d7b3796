"""The environment of the tests: eight host devices, one compilation cache, no network by default.

This module sets environment variables. It must be imported before JAX, which reads the variables
when it is imported. Subprocesses inherit the variables.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile

CACHE = os.environ.get("HFSEQ_TEST_CACHE") or f"{tempfile.gettempdir()}/hfseq-tests-{os.getuid()}"
FLAGS = ["--xla_force_host_platform_device_count=8"]

# XLA needs most of the test time to compile programs that run only once. Without optimizations and
# with simple code generation, the compilation takes a third of that time. XLA aborts if it does not
# know a flag, so the flags are only set for versions that have them.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # 0 enables optimizations

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{CACHE}/jax")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Tests must not use the network. The ``hub`` fixture resets these variables for its local server.
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(name, "1")
# No test reads the lines of Python in compiled programs, and writing them there takes time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
