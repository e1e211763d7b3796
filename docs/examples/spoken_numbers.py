"""Spoken numbers to train on, by espeak-ng: files of sound, and tables with what is said.

    python docs/examples/spoken_numbers.py numbers --count 1000

writes numbers/train/*.wav and numbers/validation/*.wav, and numbers/{train,validation}.csv with the
columns audio and text. Voices, speeds and pitches are drawn at random, from one seed.
"""

import argparse
import csv
import random
import subprocess
from pathlib import Path

DIGITS = "zero one two three four five six seven eight nine".split()
VOICES = [
    f"en-{land}+{who}" for land in ("us", "gb") for who in ("m1", "m3", "m7", "f1", "f2", "f4")
]


def say(text: str, file: Path, draw: random.Random) -> None:
    """Have a random voice say ``text``, into a WAV file of 22050 samples a second."""
    voice, speed, pitch = draw.choice(VOICES), draw.randint(140, 200), draw.randint(30, 70)
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "-w", str(file), text]
    subprocess.run(command, check=True)


def write(folder: Path, count: int, seed: int) -> None:
    """Write ``count`` sounds to train on, and a tenth of that to validate."""
    draw = random.Random(seed)
    for split, number in (("train", count), ("validation", max(1, count // 10))):
        (folder / split).mkdir(parents=True, exist_ok=True)
        with open(folder / f"{split}.csv", "w", encoding="utf-8", newline="") as table:
            rows = csv.writer(table)
            rows.writerow(["audio", "text"])
            for name in range(number):
                text = " ".join(draw.choices(DIGITS, k=draw.randint(2, 4)))
                say(text, folder / split / f"{name:05}.wav", draw)
                rows.writerow([f"{split}/{name:05}.wav", text])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.folder, given.count, given.seed)
