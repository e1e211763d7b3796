"""Short audio files for tests. Each letter of a word is a sound of two tones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

SAMPLING_RATE = 16000
#: The two tones of each letter, in Hz.
LETTER_TONES = {"a": (300, 900), "b": (500, 1500), "c": (800, 2200), "d": (400, 3000)}


def synthesize_word(word: str, seed: int = 0, seconds: float = 0.06) -> np.ndarray:
    """Returns the samples of a word: a sound per letter, silence between letters, and some noise.

    Args:
        word: The letters, from `LETTER_TONES`.
        seed: Seed of the noise.
        seconds: Duration of a letter.
    """
    random = np.random.default_rng(seed)
    time = np.arange(round(SAMPLING_RATE * seconds)) / SAMPLING_RATE
    silence = np.zeros(len(time) // 3)
    parts = [silence]
    for letter in word:
        wave = sum(np.sin(2 * np.pi * hertz * time) for hertz in LETTER_TONES[letter])
        parts += [0.2 * wave * np.hanning(len(time)), silence]
    sound = np.concatenate(parts)
    return (sound + 0.005 * random.normal(size=sound.shape)).astype(np.float32)


def write_words(
    folder: Path, count: int, seed: int = 0, longest: int = 8, seconds: float = 0.06
) -> list[str]:
    """Writes `count` audio files with random words, `000.wav` and so on, and returns the words."""
    soundfile = pytest.importorskip("soundfile")
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    words = []
    for number in range(count):
        word = "".join(random.choice(list(LETTER_TONES), int(random.integers(4, longest + 1))))
        soundfile.write(
            folder / f"{number:03}.wav", synthesize_word(word, number, seconds), SAMPLING_RATE
        )
        words.append(word)
    return words


def write_bad_audio(folder: Path) -> dict[str, str]:
    """Writes invalid audio files, and returns the expected error message for each file."""
    soundfile = pytest.importorskip("soundfile")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.wav").write_text("not audio")
    (folder / "zero.wav").write_bytes(b"")
    soundfile.write(folder / "none.wav", np.zeros(0, np.float32), SAMPLING_RATE)
    soundfile.write(folder / "short.wav", np.zeros(500, np.float32), SAMPLING_RATE)
    return {
        "text.wav": "unsupported audio format",
        "zero.wav": "it is empty",
        "none.wav": "it is empty",
        "short.wav": "it is 0.0312 seconds long, less than the minimum of 0.1",
    }
