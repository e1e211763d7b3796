"""Which units of a processor multiply bfloat16: without them bfloat16 is emulated, and slow."""

from __future__ import annotations

from pathlib import Path

#: Flags of /proc/cpuinfo: x86 (AVX-512, AMX), then Arm (NEON, SVE, SME).
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16", "smebf16")


def cpu_flags(cpuinfo: str) -> list[str]:
    """Return the flags of the first processor in the text of /proc/cpuinfo (x86 or Arm)."""
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip().lower() in ("flags", "features"):
            return value.split()
    return []


def bfloat16_units(cpuinfo: str) -> list[str]:
    """Return the units that multiply bfloat16, by their flags; none where it is emulated."""
    flags = cpu_flags(cpuinfo)
    return [flag for flag in BFLOAT16_FLAGS if flag in flags]


def read_cpuinfo() -> str:
    """Return /proc/cpuinfo, or nothing where there is no such file (then no units are known)."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""
