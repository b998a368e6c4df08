"""The index of a sharded checkpoint is read without running what it says."""

import io
import os
import pickle
import random
import resource
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from megappo.checkpoint.identity import fingerprint_model
from megappo.checkpoint.safe_load import UnsafeCheckpoint, load_index, load_tensors_and_plain_data


class Call:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.parts = (function, arguments)

    def __reduce__(self):
        return self.parts


def index_of(directory, state):
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return (directory / ".metadata").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_an_index_of_torch_reads_as_with_pickle(tmp_path, dtype):
    content = index_of(tmp_path / "saved", {"weight": torch.zeros(3, 4, dtype=dtype), "object": {"a": 1}})
    assert load_index(content) == pickle.loads(content)


@pytest.mark.parametrize("where", ["alone", "inside"])
def test_a_call_in_the_index_is_not_run(tmp_path, where):
    def hostile(marker):
        call = Call(os.mkdir, str(marker))
        return pickle.dumps(call if where == "alone" else Metadata({"weight": call}, storage_data={}))

    with pytest.raises(UnsafeCheckpoint, match="posix.mkdir"):
        load_index(hostile(tmp_path / "marker"))
    assert not (tmp_path / "marker").exists()
    # Negative control: the attack works on pickle.
    pickle.loads(hostile(tmp_path / "control"))
    assert (tmp_path / "control").exists()


@pytest.mark.parametrize("function", [eval, exec, getattr, __import__, torch.load, torch.hub.load, torch.set_default_dtype])
def test_functions_are_refused_by_name(function):
    with pytest.raises(UnsafeCheckpoint, match=function.__name__):
        load_index(pickle.dumps(Call(function, "1")))


def test_members_of_the_one_enum_may_be_written_as_getattr():
    """As Python 3.11.2 does; anything else that getattr could reach is refused."""
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    written = Metadata({}, planner_data={"weight": Call(getattr, _MEM_FORMAT_ENCODING, member.name)}, storage_data={})
    assert load_index(pickle.dumps(written)).planner_data == {"weight": member}
    for owner, name in ((_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "mro")):
        with pytest.raises(UnsafeCheckpoint, match="builtins.getattr"):
            load_index(pickle.dumps(Call(getattr, owner, name)))


@pytest.mark.parametrize("name", ["Size.__class__", "os", "serialization.pickle"])
def test_dotted_names_do_not_lead_out_of_the_table(name):
    with pytest.raises(UnsafeCheckpoint):
        load_index(b"\x80\x04\x8c\x05torch" + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93.")


@pytest.mark.parametrize("path", ["../other/file", "/etc/passwd", "a/b", "..", ""])
def test_shards_outside_the_directory_are_refused(tmp_path, path):
    index = load_index(index_of(tmp_path / "saved", {"weight": torch.zeros(3)}))
    for place in index.storage_data.values():
        place.relative_path = path
    with pytest.raises(UnsafeCheckpoint, match="outside"):
        load_index(pickle.dumps(index))


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps([1, 2]), pickle.dumps(PurePosixPath("a").parts)])
def test_what_is_not_an_index_is_one_line(content):
    with pytest.raises(UnsafeCheckpoint) as refusal:
        load_index(content)
    assert "\n" not in str(refusal.value)


def test_objects_in_tensor_files_are_refused(tmp_path):
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "extra": Call(os.mkdir, str(tmp_path / "marker"))}, buffer)
    buffer.seek(0)
    with pytest.raises(UnsafeCheckpoint, match="extra.pt holds more"):
        load_tensors_and_plain_data(buffer, "extra.pt")
    assert not (tmp_path / "marker").exists()


def test_a_models_fingerprint_follows_its_content_not_its_path(tmp_path):
    def model(name, weights, config=b"{}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(config)
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        return fingerprint_model(tmp_path / name)

    large = bytearray(6 << 20)
    first = model("a", bytes(large))
    assert first == model("b", bytes(large))
    assert first != model("config", bytes(large), b"{ }")
    assert first != model("size", bytes(large[1:]))
    for place in (0, 1 << 20, len(large) // 2):  # header, and two of the blocks that are sampled
        changed = bytearray(large)
        for offset in range(place, min(place + (1 << 19), len(large)), 997):
            changed[offset] = 1
        assert first != model(f"at{place}", bytes(changed))
    with pytest.raises(ValueError, match="no config.json"):
        fingerprint_model(tmp_path)


MUTATIONS = 400


def mutated(content: bytes, chosen: random.Random) -> bytes:
    """Some bytes changed, removed or put in, or opcodes that ask for what a pickle can do."""
    result = bytearray(content)
    for _ in range(chosen.choice((1, 1, 2, 8))):
        where, kind = chosen.randrange(len(result)), chosen.randrange(4)
        if kind == 0:
            result[where] = chosen.randrange(256)
        elif kind == 1:
            del result[where : where + chosen.randrange(1, 40)]
        elif kind == 2:
            result[where:where] = result[chosen.randrange(len(result)) :][: chosen.randrange(1, 40)]
        else:
            result[where : where + 1] = chosen.choice(
                (b"R", b"b", b"\x93", b"\x92", b"0", b"2", b"l", b"}", b"N", b"(", b"u", b"\x8f")
            )
    return bytes(result)


def test_a_mutated_index_is_read_or_refused_and_raises_nothing_else(tmp_path):
    """Of 6,000 mutations, 787 raised something else before every exception of the unpickler was taken for a refusal."""
    state = {"weight": torch.zeros(3, 4), "bias": torch.zeros(4, dtype=torch.bfloat16), "object": {"a": 1}}
    content, chosen = index_of(tmp_path / "saved", state), random.Random(13)
    refused = 0
    for _ in range(MUTATIONS):
        try:
            assert isinstance(load_index(mutated(content, chosen)), Metadata)
        except UnsafeCheckpoint as refusal:
            refused += 1
            assert "\n" not in str(refusal)
    assert refused > MUTATIONS // 2


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x80\x04Nr\xff\xff\xff\xff.",  # LONG_BINPUT: a memo of 2**32 slots, 64 GiB for 9 bytes
        b"\x80\x00Np4294967295\n.",  # PUT, the same in text
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # BYTEARRAY8 of a terabyte
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",  # BINBYTES8
        b"\x80\x04\x95\xff\xff\xff\xff\xff\x00\x00\x00.",  # FRAME
    ],
)
def test_a_small_file_cannot_ask_for_much_memory(hostile):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (256 << 20), limits[1]))  # a MemoryError would be raised as one
    try:
        with pytest.raises(UnsafeCheckpoint, match="not readable"):
            load_index(hostile)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_want_of_memory_is_not_taken_for_a_hostile_file(tmp_path, monkeypatch):
    content = index_of(tmp_path / "saved", {"weight": torch.zeros(3)})
    for fault in (MemoryError, KeyboardInterrupt):

        def load(self, fault=fault):
            raise fault

        monkeypatch.setattr("megappo.checkpoint.safe_load._IndexUnpickler.load", load, raising=False)
        with pytest.raises(fault):
            load_index(content)


def shape_as_a_list(index):
    index.state_dict_metadata["weight"].size = [3]


def dtype_as_text(index):
    index.state_dict_metadata["weight"].properties.dtype = "float32"


def negative_offset(index):
    next(iter(index.storage_data.values())).offset = -1


def number_as_a_name(index):
    index.state_dict_metadata[5] = index.state_dict_metadata.pop("weight")


@pytest.mark.parametrize("change", [shape_as_a_list, dtype_as_text, negative_offset, number_as_a_name])
def test_an_index_of_other_types_is_refused_before_torch_uses_it(tmp_path, change):
    index = load_index(index_of(tmp_path / "saved", {"weight": torch.zeros(3)}))
    change(index)
    with pytest.raises(UnsafeCheckpoint):
        load_index(pickle.dumps(index))
