"""States taken apart into JSON and tensors, through files, and put together again."""

import collections
import enum
import json
import math
import random
import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import tensor as dtensor

from accumplug.errors import CheckpointError, MovedError
from accumplug.storage.codec import MAX_DEPTH, encode, local_shard
from accumplug.storage.decode import decode
from accumplug.storage.json import dump_json, parse_json
from accumplug.storage.safetensors_io import read_tensors, write_tensors

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
]


def through_files(state, mapped=False):
    tree, tensors = encode(state)
    with tempfile.TemporaryDirectory() as folder:
        entry = write_tensors(Path(folder, "t.safetensors"), tensors)
        read = read_tensors(Path(folder, "t.safetensors"), entry, mapped=mapped)
    return decode(parse_json(dump_json(tree), Path("t.json")), read, Path("t.json"))


def raw(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def assert_same(a, b):
    """Equal in type, value and bits, all the way down."""
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(raw(a), raw(b))
        return
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b))
        for x, y in zip(a.values(), b.values(), strict=True):
            assert_same(x, y)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b)


@st.composite
def any_tensor(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    seed = draw(st.integers(0, 2**32))
    item = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = math.prod(shape) * item
    data = torch.randint(high, (size,), dtype=torch.uint8, generator=generator)
    tensor = data.view(dtype).reshape(shape)
    kind = draw(st.sampled_from(["plain", "reversed", "sliced", "expanded", "parameter"]))
    if kind == "reversed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if kind == "sliced" and tensor.dim():
        return tensor[..., ::2]
    if kind == "expanded":
        return tensor.unsqueeze(0).expand(3, *shape)
    if kind == "parameter" and tensor.is_floating_point():
        return nn.Parameter(tensor)
    return tensor


plain = st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200)
plain |= st.floats() | st.text(max_size=8) | st.sampled_from(["$tensor", "__metadata__"])
keys = st.text(max_size=5) | st.integers() | st.sampled_from(["$dict", "$", "a.b", "a", True, None])
keys |= st.tuples(st.integers(), st.text(max_size=2))


def containers(inner):
    items = st.lists(inner, max_size=4)
    named = st.dictionaries(keys, inner, max_size=4)
    ordered = named.map(collections.OrderedDict)
    counted = st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter)
    return items | items.map(tuple) | named | ordered | counted


@given(st.recursive(plain | any_tensor(), containers, max_leaves=12), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_state_comes_back_the_same(state, mapped):
    """Types, values, bits and order are those of the state that was given."""
    assert_same(state, through_files(state, mapped))


@given(st.recursive(plain, containers, max_leaves=12))
@settings(max_examples=50, deadline=None)
def test_the_tree_is_strict_json(state):
    """Another JSON reader than Python's lenient one can read it: no NaN, no Infinity."""
    json.loads(dump_json(encode(state).tree), parse_constant=pytest.fail)


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


OPTIMIZERS = {
    "AdamW": {"amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {},
    "RMSprop": {"momentum": 0.9},
    "Adagrad": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "Adafactor": {},
    "ASGD": {},
    "Adamax": {},
    "Adadelta": {},
    "LBFGS": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Converting a tensor")  # LBFGS of torch 2.8
def test_the_state_of_each_optimizer_comes_back_the_same(name):
    """Integer keys, tuples (betas), 0-dim step tensors, LBFGS's lists: what torch has, is kept."""
    model = a_model()
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])

    def loss():
        optimizer.zero_grad()
        loss = model(torch.ones(5, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(loss)
    assert_same(optimizer.state_dict(), through_files(optimizer.state_dict()))


SCHEDULERS = {
    "MultiStepLR": {"milestones": [3, 3, 5]},
    "StepLR": {"step_size": 2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "LambdaLR": {"lr_lambda": lambda step: 0.5},
    "ReduceLROnPlateau": {},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_each_scheduler_comes_back_the_same(name):
    """MultiStepLR's Counter and ReduceLROnPlateau's infinity among them."""
    optimizer = torch.optim.SGD(a_model().parameters(), lr=0.1, momentum=0.9)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULERS[name])
    optimizer.step()
    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert_same(scheduler.state_dict(), through_files(scheduler.state_dict()))


def test_random_states_come_back_the_same():
    """Python's is a tuple with 625 big integers in it, torch's a byte tensor."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    assert_same(state, through_files(state))


def test_a_module_that_migrates_old_states_knows_that_this_is_a_new_one():
    """load_state_dict tells a module the version that wrote the state, also after a checkpoint."""

    class Migrates(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict, prefix, metadata, *rest):
            if metadata.get("version", 1) < 2:
                state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 0
            super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    saved, loaded = Migrates(2, 2), Migrates(2, 2)
    loaded.load_state_dict(through_files(saved.state_dict()))
    assert torch.equal(saved.weight, loaded.weight)


def test_tied_weights_are_stored_once_and_come_back_tied():
    """A head that is the embedding: one tensor in the file, one memory after reading."""
    weight = torch.randn(5, 3)
    state = {"embedding.weight": weight, "head.weight": weight}
    assert list(encode(state).tensors) == ["embedding.weight"]
    back = through_files(state)
    back["head.weight"][0, 0] = 7
    assert back["embedding.weight"][0, 0] == 7


def test_tied_weights_in_channels_last_come_back_tied_with_their_strides():
    """Strides matter: a sum over memory in another order is rounded differently."""
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = through_files({"a": weight, "b": weight})
    assert back["a"].stride() == weight.stride()
    assert back["a"] is back["b"]
    assert torch.equal(back["a"], weight)


def test_views_that_overlap_come_back_equal_each_in_memory_of_its_own():
    """A whole and its transpose, row and last column, and the same bytes as another dtype."""
    whole = torch.randn(4, 6)
    state = {"row": whole[1], "whole": whole, "turned": whole.t(), "column": whole[:, -1]}
    state |= {"bits": whole.view(torch.int32), "folded": whole[:1].expand(3, 6)}
    assert list(encode(state).tensors) == ["row", "whole", "turned", "column", "bits", "folded"]
    assert_same(state, through_files(state))


@pytest.mark.parametrize("mapped", [False, True])
def test_sparse_tensors_come_back_the_same(mapped):
    """Uncoalesced ones too, as the sum of an Embedding's sparse gradients is."""
    indices, values = torch.tensor([[4, 1, 4]]), torch.randn(3, 2)
    for coalesced in (False, True):
        tensor = torch.sparse_coo_tensor(indices, values, (6, 2), check_invariants=True)
        tensor = tensor.coalesce() if coalesced else tensor
        back = through_files({"grad": tensor}, mapped)["grad"]
        assert (back.is_sparse, back.is_coalesced(), back.shape) == (True, coalesced, (6, 2))
        assert_same(tensor._indices(), back._indices())
        assert_same(tensor._values(), back._values())


def test_complex_tensors_come_back_tied_conjugated_and_turned():
    """A conjugate is a flag on the memory, which a file does not have."""
    a = torch.randn(2, 3, dtype=torch.complex64)
    state = {"a": a, "tied": a, "conj": a.conj(), "turned": a.t(), "imag": a.conj().imag}
    back = through_files(state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
    back["a"][0, 0] = 7
    assert back["tied"][0, 0] == 7


@pytest.mark.parametrize(
    "value",
    [
        b"",
        bytes(range(256)),
        numpy.arange(6.0).reshape(2, 3).T,
        numpy.array(5),
        numpy.array([1 + 2j]),
        numpy.array([True, False]),
        numpy.arange(3, dtype=">u4"),
        numpy.zeros((0, 3), "uint16"),
    ],
    ids=repr,
)
def test_bytes_and_arrays_come_back_as_what_they_were(value):
    """Bytes stay bytes: nothing here unpickles what a module has pickled."""
    back = through_files([value])[0]
    if isinstance(value, bytes):
        assert back == value
        return
    if value.shape == ():
        assert back == value.item()  # a number
        return
    assert (back.dtype.kind, back.shape) == (value.dtype.kind, value.shape)
    assert (back == value).all()
    back[...] = 0  # in memory of its own
    assert through_files([value])[0].tolist() == value.tolist()


def test_an_array_is_copied_when_it_is_encoded():
    """A loop may go on writing into it while a thread writes the file."""
    array = numpy.zeros(3)
    tensors = encode([array]).tensors
    array += 1
    assert tensors["0"].tolist() == [0, 0, 0]


def test_long_tuples_of_integers_are_tensors_in_the_file():
    """The 625 words of Python's generator: no JSON, and not a call for each."""
    state = {"words": random.getstate(), "big": (2**63,) * 20, "mixed": (True,) * 20}
    assert list(encode(state).tensors) == ["words.1"]
    assert_same(state, through_files(state))


def test_gradients_in_one_bucket_are_stored_one_by_one():
    """DDP's gradients are views of a bucket that share no byte: each keeps its name and shape."""
    bucket = torch.randn(10)
    encoded = encode([bucket[:4].view(2, 2), bucket[4:]])
    assert [(n, list(t.shape)) for n, t in encoded.tensors.items()] == [("0", [2, 2]), ("1", [6])]


def test_a_slice_does_not_drag_its_storage_into_the_file():
    """Two numbers of a million: eight bytes."""
    encoded = encode(torch.zeros(1_000_000)[5:7])
    assert [tensor.nbytes for tensor in encoded.tensors.values()] == [8]


def test_encoding_copies_no_tensor():
    """What is to be written lies in the very memory of the state."""
    model = a_model()
    tensors = encode(model.state_dict()).tensors
    assert all(tensors[n].data_ptr() == t.data_ptr() for n, t in model.state_dict().items())
    assert len(tensors) == len(model.state_dict())


def test_a_models_tensors_are_named_like_its_parameters():
    """So that model.safetensors can be used by everything else that reads such files."""
    model = a_model()
    assert encode(model.state_dict(), "model").tensors.keys() == model.state_dict().keys()


def test_names_that_would_meet_are_told_apart():
    """Two paths with one spelling, and the name that safetensors keeps for itself."""
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    state = {"a": {"b": a}, "a.b": b, "__metadata__": c}
    assert list(encode(state).tensors) == ["a.b", "a.b_", "__metadata___"]
    assert_same(state, through_files(state))


def test_numpy_scalars_become_python_numbers():
    """Equal in value; NumPy is not needed to read them."""
    state = [numpy.float32(0.1), numpy.int64(3), numpy.bool_(True), numpy.float64("nan")]
    assert_same([float(numpy.float32(0.1)), 3, True, math.nan], through_files(state))


class Colour(enum.IntEnum):
    RED = 1


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        ({1}, "builtins.set"),
        (bytearray(b"x"), "builtins.bytearray"),
        (1j, "builtins.complex"),
        (len, "builtin_function"),
        (Colour.RED, "Colour"),
        (collections.defaultdict(list), "collections.defaultdict"),
        (numpy.array([object()]), "numpy.ndarray"),
        (numpy.array(["x"]), "numpy.ndarray"),
        (numpy.datetime64("2020"), "numpy.datetime64"),
        (torch.float32, "torch.dtype"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2).as_subclass(Marked), "Marked, a tensor whose content"),
        ({torch.zeros(1): 1}, "has a Tensor as a key"),
        ({(1, torch.zeros(1)): 1}, "has a tuple as a key"),
    ],
)
def test_what_is_neither_tensor_nor_json_is_refused_with_its_path(value, kind):
    """The user learns which entry of which object, and what it is, before anything is written."""
    with pytest.raises(TypeError, match=rf"^optimizer\.state\[0\]\.foo .*{kind}"):
        encode({"state": {0: {"foo": value}}}, "optimizer")


def test_a_state_that_contains_itself_is_refused_with_its_path():
    """Instead of running until the stack ends."""
    state = {}
    state["x"] = state
    with pytest.raises(ValueError, match=r"^ema\.x\.x.* nested more than 64 deep"):
        encode(state, "ema")


def test_the_deepest_state_that_can_be_saved_can_be_read():
    """The limit is one and the same on both sides."""
    state = 1
    for _ in range(MAX_DEPTH):
        state = {0: state}
    assert_same(state, through_files(state))


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "unknown"},
        {"$tensor": ["t"]},
        {"$tensor": "t", "more": 1},
        {"$tensor": "t", "stride": [1, 1]},
        {"$tensor": "t", "stride": [10**12, 1]},
        {"$tensor": "t", "stride": "31"},
        {"$tensor": "t", "view": {}},
        *(
            {"$tensor": "t", "view": {"dtype": d, "offset": o, "shape": s, "stride": t}}
            for d, o, s, t in [
                ("float32", 0, [7], [1]),
                ("float32", 4, [2, 3], [3, 1]),
                ("float32", -4, [1], [1]),
                ("float32", 2, [1], [1]),
                ("float32", 0, [2], [10**12]),
                ("float32", 0, [2], [-1]),
                ("float32", 0, [2, 2], [1]),
                ("float32", 0, [True], [1]),
                ("float32", 0, [2**47] * 3, [0] * 3),
                ("float32", 0, [1] * 100, [1] * 100),
                ("float31", 0, [1], [1]),
                ("float64", 0, [4], [1]),
                (["float32"], 0, [1], [1]),
            ]
        ),
        {"$float": "1e5"},
        {"$float": 1},
        {"$tuple": {}},
        {"$tuple": [], "x": 1},
        {"x": 1, "$tuple": []},
        {"$dict": 5},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dict": [[{"$tensor": "t"}, 1]]},
        {"$dict": [[1, 1], [1, 2]]},
        {"$counter": [["a"]]},
        {"$ordered": [1]},
        {"$ordered": {}, "x": 1},
        {"$object": "os.system"},
        *(
            {marker: content}
            for marker in ("$ints", "$bytes", "$array", "$complex", "$sparse", "$shard")
            for content in ([1], "t", None, {}, {"x": 1}, {"$float": "inf"}, {"$tuple": []})
        ),
        {"$complex": {"$tensor": "t"}},
        {"$sparse": {"indices": 1, "values": 2, "size": 3, "coalesced": 4}},
        {
            "$sparse": {
                "indices": {"$tensor": "t"},
                "values": {"$tensor": "t"},
                "size": [1],
                "coalesced": True,
            }
        },
        *(
            {
                "$shard": {
                    "local": {"$tensor": "t"},
                    "offsets": o,
                    "global_shape": g,
                    "placements": p,
                }
            }
            for o, g, p in [
                ([0], [2, 3], [0]),
                ([0, 0], [2], [0]),
                ([0, -1], [2, 3], [0]),
                ([0, 0], [2, 3], [2]),
                ([0, 0], [2, 3], 5),
                ([0, 0], [2.0, 3], [None]),
            ]
        ),
    ],
    ids=str,
)
def test_a_tree_that_was_never_saved_is_refused_naming_the_file(tree):
    """A hostile tree is one clear error: no crash, no memory outside the tensor, no allocation."""
    with pytest.raises(CheckpointError, match=r"^model\.json: "):
        decode({"x": [tree]}, {"t": torch.zeros(2, 3)}, Path("model.json"))


def test_a_tree_nested_too_deep_is_refused():
    """As deep as json reads and as deep as it doesn't."""
    for depth in (MAX_DEPTH + 5, 400):
        with pytest.raises(CheckpointError, match=r"^m\.json: nested more than 64"):
            decode(json.loads("[" * depth + "]" * depth), {}, Path("m.json"))
    with pytest.raises(CheckpointError, match=r"^m\.json: not valid JSON"):
        parse_json(b"[" * 100_000 + b"]" * 100_000, Path("m.json"))


def test_a_torch_that_places_shards_otherwise_is_named(monkeypatch):
    """Before anything is written; nothing else of a checkpoint needs that function."""
    monkeypatch.delattr(dtensor._utils, "compute_local_shape_and_global_offset")
    with pytest.raises(MovedError, match=r"moved .*\.compute_local_shape_and_global_offset"):
        local_shard(torch.Size([4]), None, [])
