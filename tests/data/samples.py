"""Short texts that are the same in every run."""

import random

WORDS = "en lov om å bygge språkmodeller skal gjelde for alle som leser og skriver norsk".split()


def make_texts(count: int, seed: int = 0) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=chooser.randint(3, 40))) for _ in range(count)]
