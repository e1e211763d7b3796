"""The PyTorch twin: files that lie beside every checkpoint, for Transformers without hfseq."""

from __future__ import annotations

import shutil
from pathlib import Path

FILES = Path(__file__).parent / "torch_files"
CONFIGURATION = "configuration_vq_transformer"
MODELING = "modeling_vq_transformer"
#: What ``config.json`` says about these files; Transformers reads it with trust_remote_code=True.
AUTO_MAP = {
    "AutoConfig": f"{CONFIGURATION}.VQTransformerConfig",
    "AutoModel": f"{MODELING}.VQTransformerModel",
    "AutoModelForCausalLM": f"{MODELING}.VQTransformerForCausalLM",
    "AutoModelForSequenceClassification": f"{MODELING}.VQTransformerForSequenceClassification",
}


def ship(folder: Path) -> None:
    """Copy the twin's files into the checkpoint at ``folder``; they import nothing of hfseq."""
    for file in sorted(FILES.glob("*_vq_transformer.py")):
        shutil.copyfile(file, Path(folder) / file.name)
