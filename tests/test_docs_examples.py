"""The Python that the pages for users show runs, and the names in it exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RUN = [
    *(DOCS / f"{name}.md" for name in ("losses", "migration", "nnx", "own_sharding", "precision")),
    *sorted((DOCS / "families").glob("*.md")),
]


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page in order, each behind as many empty lines as come before it."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    return ["\n" * text[: match.start(1)].count("\n") + match[1] for match in found]


def needs_the_hub(block: str) -> bool:
    """Tell whether a block loads a model that is not made in the page."""
    return re.search(r'^name = "[\w-]+/[\w.-]+"$', block, flags=re.M) is not None


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    RUN,
    ids=named,
)
@pytest.mark.filterwarnings("default")
def test_the_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    """All of a page's blocks share their names; those that name a model on the Hub are left out."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    ran = [block for block in blocks(page) if not needs_the_hub(block)]
    assert len(ran) >= 2
    for block in ran:
        exec(compile(block, named(page), "exec"), names)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_training_loop_of_the_fp8_guide_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (loop,) = [block for block in blocks(DOCS / "fp8.md") if "from_gradient" in block]
    exec(compile(loop, "docs/fp8.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_name_imported_from_hfseq_exists(page):
    text = page.read_text(encoding="utf-8")
    for module, names in re.findall(
        r"^[^-\n]*?\bfrom (hfseq[\w.]*) import ([\w, ]+)", text, flags=re.M
    ):
        for name in filter(None, re.split(r"[,\s]+", names.strip())):
            exec(f"from {module} import {name}", {})


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_class_that_is_named_exists(page):
    """Whatever looks like a class of ours in code is one, but where the page says it is not."""
    import hfseq

    text = page.read_text(encoding="utf-8").split("## What is not here")[0]
    theirs = {"FlaxMyModelForMaskedLM", "FlaxMyEncoderForMaskedLM"}
    theirs |= {"FlaxBartEncoderLayer"}  # a Linen module
    text = re.sub(r"^\| `Flax\w+` \| .* \| not yet \| .*$", "", text, flags=re.M)  # not here yet
    code = " ".join(re.findall(r"`[^`\n]+`", text))
    for name in set(re.findall(r"(?<![\w…-])Flax[A-Z]\w+(?![\w…*])", code)) - theirs:
        assert hasattr(hfseq, name), name


@pytest.mark.filterwarnings("default")
def test_the_code_of_the_front_pages_runs_and_pytorch_agrees(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    import transformers

    import hfseq
    from hfseq.data.tokenizers import train_tokenizer
    from tests.support.models import roberta_config

    monkeypatch.chdir(tmp_path)
    text = "The capital of France is Paris."
    tokenizer = train_tokenizer([[text] * 9], "roberta", None, 280, tmp_path)
    config = roberta_config(vocab_size=len(tokenizer), initializer_range=0.5, type_vocab_size=1)
    hfseq.FlaxAutoModelForMaskedLM.from_config(config).save_pretrained("my-roberta")
    tokenizer.save_pretrained("my-roberta")
    shown = {page: blocks(page)[0] for page in (ROOT / "README.md", DOCS / "index.md")}
    assert len({block.strip() for block in shown.values()}) == 1  # the same on both
    names: dict = {}
    code = shown[ROOT / "README.md"].replace("FacebookAI/roberta-base", "my-roberta")
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and printed[1].startswith("FlaxRobertaForMaskedLM('my-roberta', ")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained("my-roberta")
    with torch.no_grad():
        expected = theirs(**tokenizer(text, return_tensors="pt")).logits.numpy()
    logits = names["model"](**tokenizer(text, return_tensors="np")).logits
    largest = abs(expected).max()
    assert largest > 1 and abs(logits - expected).max() <= 1e-5 * largest
