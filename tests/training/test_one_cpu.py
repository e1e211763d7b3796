"""On a single CPU, which splits work into blocks, every architecture computes the same values.

The tests run on eight devices, where a CPU does not split work.
"""

from __future__ import annotations

import pytest

from hfseq import plugins
from hfseq.nn import attention, cpu, dispatch
from hfseq.objectives import cross_entropy
from tests.support import parallel
from tests.training.test_parallel_models import assert_same

NAMES = sorted(plugins.load().architectures)
#: Cases in which another implementation is selected, and the reason.
OTHERS = {
    "vq_transformer": "its attention is its own",
    "gemma2": "its soft cap takes the explicit form",
    "big_bird": "its first and last block are few queries",
    "falcon_mamba": "it has no attention",
    "gpt_oss": "its sinks take the explicit form",
    "mamba2": "it has no attention",
    "regnet": "it has no attention",
    "resnet": "it has no attention",
    ("bloom", "pieces"): "its bias is not cut into pieces",
    ("deberta-v2", "pieces"): "its bias differs between rows",
    ("wavlm", "pieces"): "its bias differs between rows",
    ("mistral", "direct"): "it has windows",
}
CASES = [(name, variant) for variant in ("direct", "pieces") for name in NAMES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_losses_and_gradients_are_those_of_several_devices(name, variant, monkeypatch):
    task = parallel.main_head(name)
    usual = parallel.run(name, task, None)
    for module in (cpu, cross_entropy):
        monkeypatch.setattr(module, "is_single_cpu", lambda: True)
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 4 * parallel.VOCABULARY)
    if variant == "pieces":
        monkeypatch.setattr(cpu, "MIN_BLOCKED_SCORES", 1)
    used = []

    def choose(*request):
        implementation = dispatch.first_supported(*request)
        used.append(implementation.name)
        return implementation

    def losses(*arguments, real=cross_entropy._losses, **keywords):
        used.append("losses")
        return real(*arguments, **keywords)

    monkeypatch.setattr(attention, "first_supported", choose)
    monkeypatch.setattr(cross_entropy, "_losses", losses)
    parallel.compile_step.cache_clear()
    alone = parallel.run(name, task, None)
    parallel.compile_step.cache_clear()
    assert_same(alone, usual)
    if (name, variant) not in OTHERS and name not in OTHERS:
        assert ("blocked" if variant == "pieces" else "direct") in used
    assert "losses" in used or task not in parallel.LANGUAGE
