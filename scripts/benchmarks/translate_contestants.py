"""What runs in the processes of the translation benchmark: weights, and a translator each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contestants
import harness

#: Marian-base, the size of the opus-mt models; the last token is padding and begins targets.
MARIAN = {
    "vocab_size": 54688, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
    "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048, "max_position_embeddings": 512, "activation_function": "swish",
    "scale_embedding": True, "init_std": 0.05,
}  # fmt: skip
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
END, UNKNOWN = 0, 1


def configuration(size: dict[str, Any]) -> Any:
    """Return Marian's configuration; ``size`` as in :func:`models.configuration`."""
    from transformers import MarianConfig

    changes = dict(size)
    layers = changes.pop("layers", None)
    values = MARIAN | ({} if layers is None else dict.fromkeys(LAYERS, layers)) | changes
    pad = values["vocab_size"] - 1
    return MarianConfig(
        **values, pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=END, bos_token_id=END,
        forced_eos_token_id=None,
    )  # fmt: skip


def names(vocab_size: int) -> list[str]:
    """Return made-up words, one for each id: CTranslate2 is given words."""
    return ["</s>", "<unk>", *(f"t{i}" for i in range(2, vocab_size - 1)), "<pad>"]


def save_weights(folder: str, size: dict[str, Any]) -> harness.Running:
    """Write the weights that all start from, and their conversion for CTranslate2 if it is here."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import MarianMTModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = configuration(size)
    MarianMTModel(config).save_pretrained(folder)
    words = {word: number for number, word in enumerate(names(config.vocab_size))}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
    ).save_pretrained(folder)  # fmt: skip
    if not harness.Contestant("", "", "", requires=("ctranslate2",)).missing():
        import ctranslate2

        converter = ctranslate2.converters.TransformersConverter(folder)
        converter.convert(str(Path(folder) / "ctranslate2"))
    return harness.Running(lambda: {}, harness.host_peak_bytes)


def options_of(config: Any, beams: int, new_tokens: int) -> dict[str, Any]:
    """Return the options of ``generate``: so many tokens, and never padding, as opus-mt has it."""
    return {
        "num_beams": beams, "do_sample": False, "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens, "bad_words_ids": [[config.pad_token_id]],
    }  # fmt: skip


def read_batches(folder: str) -> list[list[list[int]]]:
    """Return the batches of token ids that the parent wrote."""
    return json.loads((Path(folder) / "sources.json").read_text())


def padded(rows: list[list[int]], count: int, pad: int) -> tuple[Any, Any]:
    """Return ids and mask (count, longest), int32; spare rows are like the first."""
    import numpy as np

    rows = rows + rows[:1] * (count - len(rows))
    ids = np.full((count, max(map(len, rows))), pad, np.int32)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return ids, (np.arange(ids.shape[1])[None] < np.array([[len(r)] for r in rows])).astype(
        np.int32
    )


def running(
    batches: list[Any], translate: Callable[[Any], Any], memory: Callable[[], int], facts: Any
) -> harness.Running:
    """Return a contestant that translates the next batch at each step.

    Before the first step it translates one batch of each width, so that all is compiled.
    """
    for batch in {max(map(len, batch)): batch for batch in batches}.values():
        translate(batch)
    done = 0

    def step() -> dict[str, Any]:
        nonlocal done
        batch = batches[done % len(batches)]
        done += 1
        return {"tokens": [[int(token) for token in row] for row in translate(batch)]}

    return harness.Running(step, memory, facts)


def hfseq_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> harness.Running:
    """hfseq's ``generate``; batches are filled up to one number of rows, so it compiles less."""
    import numpy as np

    import hfseq

    config, batches = configuration(size), read_batches(folder)
    options, rows = options_of(config, beams, new_tokens), max(map(len, batches))
    model = hfseq.FlaxAutoModelForSeq2SeqLM.from_pretrained(folder, config=config, dtype=dtype)
    if dtype == "bfloat16":
        model.params = model.to_bf16(model.params)

    def translate(batch: list[list[int]]) -> Any:
        ids, mask = padded(batch, rows, config.pad_token_id)
        found = model.generate(ids, attention_mask=mask, **options).sequences
        return np.asarray(found)[: len(batch), -new_tokens:]

    facts = contestants.jax_facts(model.params)
    return running(batches, translate, harness.jax_peak_bytes, facts)


def torch_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> harness.Running:
    """PyTorch's ``generate``."""
    import torch
    from transformers import MarianMTModel

    config, batches = configuration(size), read_batches(folder)
    options = options_of(config, beams, new_tokens)
    model = MarianMTModel.from_pretrained(folder, config=config, dtype=getattr(torch, dtype)).eval()

    def translate(batch: list[list[int]]) -> Any:
        ids, mask = padded(batch, len(batch), config.pad_token_id)
        with torch.inference_mode():
            found = model.generate(
                torch.from_numpy(ids).long(),
                attention_mask=torch.from_numpy(mask).long(),
                **options,
            )
        return found[:, -new_tokens:].numpy()

    facts = contestants.torch_facts(model, "cpu")
    return running(batches, translate, harness.torch_peak_bytes, facts)


def ctranslate2_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> harness.Running:
    """CTranslate2's translator, which gets and gives words."""
    import ctranslate2

    words, batches = names(configuration(size).vocab_size), read_batches(folder)
    numbers = {word: number for number, word in enumerate(words)}
    translator = ctranslate2.Translator(
        str(Path(folder) / "ctranslate2"), device="cpu", compute_type=dtype, inter_threads=1,
        intra_threads=len(os.sched_getaffinity(0)),
    )  # fmt: skip

    def translate(batch: list[list[int]]) -> Any:
        found = translator.translate_batch(
            [[words[token] for token in row] for row in batch], beam_size=beams,
            min_decoding_length=new_tokens, max_decoding_length=new_tokens, max_batch_size=0,
        )  # fmt: skip
        return [[numbers[word] for word in result.hypotheses[0]] for result in found]

    return running(batches, translate, harness.host_peak_bytes, {"device": "cpu"})
