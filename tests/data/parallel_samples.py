"""Pairs and flags for the tests of parallel text."""

from hfseq.data.arguments import TranslationArguments

PAIRS = [(f"House number {i}", f"Haus «{i}»") for i in range(40)]


def flags(*train, **options) -> TranslationArguments:
    """Returns data flags. Files may be paths, and no split is held out by default."""
    for name in ("train_file", "validation_file", "test_file"):
        if name in options:
            options[name] = [str(file) for file in options[name]]
    if train:
        options["train_file"] = [str(file) for file in train]
    options.setdefault("validation_split_percentage", 0)
    return TranslationArguments(**options)


def pairs(split) -> list[tuple[str, str]]:
    """Returns a split as a list of pairs."""
    return list(zip(split["source"], split["target"], strict=True))
