"""Headers, indices and JSON from Hypothesis: a correct result or an error of hfseq.

`test_mutations.py` damages valid files. These files are generated from the elements of the formats,
and Hypothesis minimizes the findings.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from hfseq import errors
from hfseq.checkpoints import files
from hfseq.errors import CheckpointError

pytestmark = pytest.mark.slow
# Use the same examples in every run, and write no database to the source tree.
PLAIN = settings(max_examples=150, deadline=None, derandomize=True, database=None)
DATA = bytes(range(64))
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "I64": 8, "F64": 8}

NUMBERS = st.one_of(st.integers(-2, 70), st.sampled_from([2**31, 2**63, 2**64, 10**30]))
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*WIDTHS, "F8_E4M3", "Q9", ""]),
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    }
)
WHOLE = st.builds(
    lambda kind, length, start: {
        "dtype": kind,
        "shape": [length],
        "data_offsets": [start, start + length * WIDTHS[kind]],
    },
    st.sampled_from(list(WIDTHS)),
    st.integers(0, 8),
    st.sampled_from([0, 0, 8]),
)
HEADERS = st.dictionaries(
    st.text(max_size=4) | st.just("__metadata__"),
    WHOLE | ENTRIES | st.text(max_size=3) | st.none() | NUMBERS,
    max_size=3,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@PLAIN
@given(HEADERS, st.integers(-3, 3), st.integers(0, 64))
def test_a_header_is_refused_or_its_tensors_are_those_of_the_file(header, lie, size):
    text = json.dumps(header).encode()
    data = DATA[:size]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(max(len(text) + lie, 0).to_bytes(8, "little") + text + data)
        try:
            parsed = files.open_file(str(path)).tensors
            values = {name: np.asarray(tensor.read(...)) for name, tensor in parsed.items()}
        except CheckpointError as error:
            assert str(path) in str(error)
            return
    for name, value in values.items():
        begin, end = header[name]["data_offsets"]
        assert value.tobytes() == data[begin:end] and len(value.tobytes()) == end - begin
        assert list(value.shape) == header[name]["shape"]
        assert value.size == math.prod(header[name]["shape"])


@PLAIN
@given(st.dictionaries(st.text(max_size=3), st.text(max_size=12) | VALUES, max_size=3) | VALUES)
def test_an_index_never_leads_out_of_its_folder(weight_map):
    requests = []

    def fetch(name):
        requests.append(name)
        return None

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": weight_map}))
        try:
            files.open_file(str(path), fetch=fetch)
        except CheckpointError as error:
            assert "index" in str(error) or any(repr(name)[1:-1] in str(error) for name in requests)
    assert all(name and not set(name) & set("/\\") and name.strip(".") for name in requests)


@PLAIN
@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_json_errors_have_one_type(data):
    try:
        parsed = errors.parse_json(data, unique_keys=True)
    except json.JSONDecodeError:
        return
    assert json.dumps(parsed) == json.dumps(json.loads(data))
