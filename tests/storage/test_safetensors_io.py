"""safetensors files: the same format as the library's, and nothing hostile gets through."""

import json
import os
import pickle
import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumplug.errors import CheckpointError
from accumplug.storage.files import BLOCK, FileEntry, checksum
from accumplug.storage.safetensors_io import DTYPES, read_tensors, write_tensors


def entry_of(data):
    """With checksums by plain Python: sums of columns and rows of 512 words, and the rest."""
    sums = []
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        end = len(block) // 4096 * 4096
        words = struct.unpack(f"<{end // 8}Q", block[:end])
        totals = [sum(words[column::512]) % 2**64 for column in range(512)]
        totals += [sum(words[row : row + 512]) % 2**64 for row in range(0, end // 8, 512)]
        text = struct.pack(f"<{len(totals)}Q", *totals) + block[end:]
        sums.append(f"{zlib.crc32(text):08x}")
    return FileEntry(len(data), "".join(sums))


def some_tensors():
    """Every dtype, no dimension, no elements, odd sizes, and one that spans several blocks."""
    data = torch.randint(2, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensors = {name: data.clone().view(dtype).view(3, -1) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "odd": data[:7].clone()}
    return tensors | {"large": torch.arange(BLOCK // 2).float()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        same = torch.equal(*(t[name].clone().view(-1).view(torch.uint8) for t in (a, b)))
        assert same, name


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    """model.safetensors is a file that every other program can use."""
    write_tensors(tmp_path / "t", some_tensors())
    assert_equal(safetensors.torch.load_file(tmp_path / "t"), some_tensors())


@pytest.mark.parametrize("mapped", [False, True])
def test_what_the_safetensors_library_writes_is_read(tmp_path, mapped):
    """Its metadata are skipped, its order of the tensors does not matter."""
    safetensors.torch.save_file(some_tensors(), tmp_path / "t", metadata={"format": "pt"})
    data = (tmp_path / "t").read_bytes()
    assert_equal(read_tensors(tmp_path / "t", entry_of(data), mapped=mapped), some_tensors())


def test_each_block_has_its_checksum(tmp_path):
    """Eight digits for every 4 MiB."""
    entry = write_tensors(tmp_path / "t", some_tensors())
    assert entry == entry_of((tmp_path / "t").read_bytes())
    assert len(entry.sums) == 3 * 8


@given(st.integers(1, 3 * 4096 + 50), st.data())
def test_any_bytes_that_change_places_or_values_change_the_checksum(size, data):
    """Two words in one row, in one column, two pages, two bits that cancel in a plain sum."""
    block = bytearray(random.Random(size).randbytes(size))
    before = checksum(memoryview(block))
    places = st.integers(0, size - 1)
    one, other, length = (
        data.draw(places),
        data.draw(places),
        data.draw(st.sampled_from([1, 8, 4096])),
    )
    one, other = sorted((one // length * length, other // length * length))
    first, second = block[one : one + length], block[other : other + length]
    if len(first) == len(second) and first != second:
        block[one : one + length], block[other : other + length] = second, first
    else:
        block[one] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(memoryview(block)) != before


@pytest.mark.parametrize("mapped", [False, True])
def test_tensors_start_where_torch_would_put_them(tmp_path, mapped):
    """At multiples of 64 bytes: a GEMM into a gradient may round differently elsewhere."""
    entry = write_tensors(tmp_path / "t", some_tensors())
    tensors = read_tensors(tmp_path / "t", entry, mapped=mapped)
    assert all(t.data_ptr() % 64 == 0 for t in tensors.values() if t.numel())


def test_whole_cache_lines_start_at_one_in_the_file(tmp_path):
    """So that a mapped tensor needs no copy; the odd ones come last."""
    write_tensors(tmp_path / "t", some_tensors() | {"last": torch.zeros(32)})
    data = (tmp_path / "t").read_bytes()
    size = int.from_bytes(data[:8], "little")
    spans = [item["data_offsets"] for item in json.loads(data[8 : 8 + size]).values()]
    assert all((8 + size + a) % 64 == 0 for a, b in spans if (b - a) % 64 == 0)
    assert sum((b - a) % 64 == 0 for a, b in spans) > 2


def test_short_reads_are_gone_on_from(tmp_path, monkeypatch):
    """The system may give less than was asked for, in the middle of a tensor."""
    entry = write_tensors(tmp_path / "t", some_tensors())
    preadv = os.preadv

    def short(file, views, offset):
        return preadv(file, [views[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert_equal(read_tensors(tmp_path / "t", entry), some_tensors())


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(tmp_path):
    """Training goes on in memory; the checkpoint stays what it was."""
    entry = write_tensors(tmp_path / "t", {"x": torch.zeros(64)})
    read_tensors(tmp_path / "t", entry, mapped=True)["x"] += 1
    assert torch.equal(read_tensors(tmp_path / "t", entry)["x"], torch.zeros(64))


def test_where_a_file_cannot_be_mapped_it_is_read(tmp_path, monkeypatch):
    """Some network file systems have no mmap."""

    def refuse(*args):
        raise OSError("no such device")

    entry = write_tensors(tmp_path / "t", some_tensors())
    monkeypatch.setattr("mmap.mmap", refuse)
    assert_equal(read_tensors(tmp_path / "t", entry, mapped=True), some_tensors())


def test_many_small_tensors_in_one_block_are_read(tmp_path):
    """More than one readv call takes (1024)."""
    tensors = {f"{i}": torch.tensor([i]) for i in range(3000)}
    entry = write_tensors(tmp_path / "t", tensors)
    assert_equal(read_tensors(tmp_path / "t", entry), tensors)


def file_with(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def item(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("pickle-was-run"),)


FOUR = b"\0" * 4
HOSTILE = {
    "empty": b"",
    "short": b"\2\0",
    "a pickle": pickle.dumps(Trap()),
    "a header of a terabyte": file_with(b"{}", size=2**40),
    "a header one byte longer than the file": file_with(b"{}", size=3),
    "a tensor of a terabyte": file_with({"x": item(shape=(2**38,), offsets=(0, 2**40))}, FOUR),
    "more dimensions than fit": file_with({"x": item(shape=(0, 2**62, 2**62), offsets=(0, 0))}),
    "a size beyond 64 bits": file_with({"x": item(shape=(0, 2**70), offsets=(0, 0))}),
    "no JSON": file_with(b"{]"),
    "no UTF-8": file_with(b'{"\xff": 1}'),
    "deep nesting": file_with(b"[" * 200_000),
    "a number too long": file_with(b'{"x": ' + b"9" * 10_000 + b"}"),
    "NaN": file_with(b'{"x": NaN}'),
    "a list": file_with([]),
    "a name twice": file_with(b'{"x": %b, "x": %b}' % ((json.dumps(item()).encode(),) * 2), FOUR),
    "no description": file_with({"x": 1}, FOUR),
    "a missing dtype": file_with({"x": {"shape": [1], "data_offsets": [0, 4]}}, FOUR),
    "an unknown dtype": file_with({"x": item("F31")}, FOUR),
    "a dtype that is a list": file_with({"x": item(["F32"])}, FOUR),
    "a float in the shape": file_with({"x": item(shape=(1.0,))}, FOUR),
    "a bool in the shape": file_with({"x": item(shape=(True,))}, FOUR),
    "a text as the shape": file_with({"x": item() | {"shape": ""}}, FOUR),
    "a negative shape": file_with({"x": item(shape=(-1, -1))}, FOUR),
    "three offsets": file_with({"x": item(offsets=(0, 4, 4))}, FOUR),
    "offsets backwards": file_with({"x": item(offsets=(4, 0))}, FOUR),
    "offsets before the data": file_with({"x": item(offsets=(-4, 0))}, FOUR),
    "offsets after the data": file_with({"x": item(offsets=(4, 8))}, FOUR),
    "a hole": file_with({"x": item(), "y": item(offsets=(8, 12))}, FOUR * 3),
    "an overlap": file_with({"x": item(), "y": item()}, FOUR),
    "bytes that belong to nothing": file_with({"x": item()}, FOUR * 2),
    "fewer bytes than its shape": file_with({"x": item(shape=(2,))}, FOUR),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_malformed_file_is_one_clear_error_and_takes_no_memory(
    tmp_path, monkeypatch, name, mapped
):
    """Even with a right checksum. The error names the file; no code in it runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"/x\.safetensors: "):
        read_tensors(path, entry_of(HOSTILE[name]), mapped=mapped)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert not Path("pickle-was-run").exists()
