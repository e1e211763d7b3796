"""Generates spoken numbers with espeak-ng: audio files, and tables with their transcripts.

    python docs/examples/spoken_numbers.py numbers --count 1000

The command writes numbers/train/*.wav and numbers/validation/*.wav, and
numbers/{train,validation}.csv with the columns audio and text. Voices, speeds and pitches are
random, and equal seeds give the same files.
"""

import argparse
import csv
import random
import subprocess
from pathlib import Path

DIGITS = "zero one two three four five six seven eight nine".split()
VOICES = [
    f"en-{region}+{speaker}"
    for region in ("us", "gb")
    for speaker in ("m1", "m3", "m7", "f1", "f2", "f4")
]


def say(text: str, file: Path, draw: random.Random) -> None:
    """Writes a WAV file (22,050 samples per second) in which a random voice says `text`."""
    voice, speed, pitch = draw.choice(VOICES), draw.randint(140, 200), draw.randint(30, 70)
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "-w", str(file), text]
    subprocess.run(command, check=True)


def write(folder: Path, count: int, seed: int) -> None:
    """Writes `count` audio files for training and a tenth as many for validation."""
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
    options = parser.parse_args()
    write(options.folder, options.count, options.seed)
