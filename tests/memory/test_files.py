"""Adapters and states on disk, and files of PyTorch without PyTorch."""

import pickle
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
from kvjax import memory
from kvjax.memory.torch_file import read_tensors
from tests.memory.conftest import INPUT, as_json, base, with_memory

TOKENS = INPUT["write_input_ids"][:1, :8]


def filled(model, tokens=TOKENS):
    return kvjax.step(model, tokens, kvjax.init_cache(model, kvjax.cache(), 1, 32))[1]


def test_an_adapter_saved_and_loaded_is_the_same(tmp_path):
    memory.save_adapter(tmp_path, with_memory())
    stored = load_file(tmp_path / "delta_mem_adapter.safetensors")
    assert stored["model.layers.1.self_attn.memory_q_proj"].shape == (8, 64)
    assert not stored["model.layers.0.self_attn.delta_k_proj"].any()  # as in the original's files
    assert as_json(tmp_path / "delta_mem_config.json")["delta_heads"] == ["q", "o"]
    config, tensors = memory.load_adapter(tmp_path)
    again = memory.tensors(memory.attach(base(), config, tensors))
    for name, value in memory.tensors(with_memory()).items():
        np.testing.assert_array_equal(again[name], value)


def test_a_conversation_goes_on_from_its_memory(tmp_path):
    model, path = with_memory(), tmp_path / "talk.safetensors"
    memory.save_state(path, filled(model))
    assert path.stat().st_size < 2048
    empty = kvjax.init_cache(model, kvjax.cache(), 1, 32)
    restored = memory.load_state(path, empty)
    assert restored.length == 0
    for mine, theirs in zip(memory.states(restored), memory.states(filled(model)), strict=True):
        np.testing.assert_array_equal(mine.matrix, theirs.matrix)


def test_a_state_of_another_model_is_refused(tmp_path):
    path = tmp_path / "talk.safetensors"
    memory.save_state(path, filled(with_memory()))
    one_layer = memory.attach(base(), memory.DeltaMemConfig(layers=(1,)))
    with pytest.raises(ValueError, match="layers"):
        memory.load_state(path, kvjax.init_cache(one_layer, kvjax.cache(), 1, 8))
    with pytest.raises(ValueError, match="shape"):
        memory.load_state(path, kvjax.init_cache(with_memory(), kvjax.cache(), 2, 8))
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="talk.safetensors: cannot be read"):
        memory.load_state(path, kvjax.init_cache(with_memory(), kvjax.cache(), 1, 8))
    with pytest.raises(ValueError, match="no memory"):
        memory.save_state(path, kvjax.init_cache(base(), kvjax.cache(), 1, 8))


def test_missing_and_damaged_adapters_are_named(tmp_path):
    with pytest.raises(ValueError, match="delta_mem_config.json: cannot be read"):
        memory.load_adapter(tmp_path)
    (tmp_path / "delta_mem_config.json").write_text('{"state_update_mode": "fast"}')
    with pytest.raises(ValueError, match="delta_mem_config.json: memory.mode"):
        memory.load_adapter(tmp_path)
    (tmp_path / "delta_mem_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds neither"):
        memory.load_adapter(tmp_path)


# ---- files of torch.save, written here opcode by opcode ---------------------------------------


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def tensor(key, kind, count, offset, shape, strides) -> bytes:
    """What torch.save writes for one tensor, in protocol 2."""
    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu")
    numbers = [b"(" + b"".join(map(number, x)) + b"t" for x in (shape, strides)]
    ordered = b"ccollections\nOrderedDict\n)R"
    return (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(count) + b"tQ"
            + number(offset) + b"".join(numbers) + b"\x89" + ordered + b"tR")  # fmt: skip


def program(**tensors: bytes) -> bytes:
    items = b"".join(text(name) + value for name, value in tensors.items())
    return b"\x80\x02}q\x00(" + items + b"u."


def write(path, pickled: bytes, compression=zipfile.ZIP_STORED, **records: bytes):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("adapter/data.pkl", pickled)
        archive.writestr("adapter/byteorder", b"little")
        for key, raw in records.items():
            archive.writestr(f"adapter/data/{key.removeprefix('r')}", raw)
    return path


NUMBERS = np.arange(12, dtype=np.float32)


def test_tensors_of_a_torch_file(tmp_path):
    half = NUMBERS.astype(ml_dtypes.bfloat16)
    path = write(
        tmp_path / "a.pt",
        program(
            whole=tensor("0", "FloatStorage", 12, 0, (3, 4), (4, 1)),
            turned=tensor("0", "FloatStorage", 12, 4, (4, 2), (1, 4)),
            half=tensor("1", "BFloat16Storage", 12, 0, (12,), (1,)),
            empty=tensor("0", "FloatStorage", 12, 0, (0, 4), (4, 1)),
        ),
        r0=NUMBERS.tobytes(), r1=half.tobytes(),
    )  # fmt: skip
    found = read_tensors(path)
    np.testing.assert_array_equal(found["whole"], NUMBERS.reshape(3, 4))
    np.testing.assert_array_equal(found["turned"], NUMBERS.reshape(3, 4)[1:].T)
    np.testing.assert_array_equal(found["half"], half)
    assert found["half"].dtype == ml_dtypes.bfloat16 and found["empty"].shape == (0, 4)


def test_a_released_adapter_is_read_as_it_is(tmp_path):
    memory.save_adapter(tmp_path, with_memory())
    (tmp_path / "delta_mem_adapter.safetensors").unlink()
    wanted, tensors, records = memory.tensors(with_memory()), {}, {}
    for i, (name, value) in enumerate(wanted.items()):
        strides = [s // 4 for s in value.strides]
        tensors[name] = tensor(str(i), "FloatStorage", value.size, 0, value.shape, strides)
        records[f"r{i}"] = value.tobytes()
    write(tmp_path / "delta_mem_adapter.pt", program(**tensors), **records)
    config, found = memory.load_adapter(tmp_path)
    again = memory.tensors(memory.attach(base(), config, found))
    for name, value in wanted.items():
        np.testing.assert_array_equal(again[name], value)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


GOOD = tensor("0", "FloatStorage", 12, 0, (3, 4), (4, 1))


@pytest.mark.parametrize(("pickled", "message"), [
    (pickle.dumps({"a": Trap()}, 2), "names '_pytest"),
    (pickle.dumps({"a": Trap()}, 4), "uses FRAME"),
    (pickle.dumps({"a": [1]}, 2), "uses EMPTY_LIST"),
    (pickle.dumps({"a": 1}, 2), "something else than a dict of tensors"),
    (pickle.dumps(1, 2), "something else than a dict of tensors"),
    (b"\x80\x02}b.", "uses BUILD"),
    (program(a=GOOD).replace(b"_rebuild_tensor_v2", b"_rebuild_wrapper__"), "names 'torch._utils"),
    (program(a=tensor("0", "FloatStorage", 12, 1, (3, 4), (4, 1))), "beyond its storage"),
    (program(a=tensor("0", "FloatStorage", 12, 0, (3, 8), (4, 0))), "repeats its storage"),
    (program(a=tensor("0", "FloatStorage", 12, 0, (3, -4), (4, 1))), "bad shape"),
    (program(a=tensor("0", "HalfStorage", 12, 0, (3, 4), (4, 1))), "holds 48 bytes"),
    (program(a=tensor("9", "FloatStorage", 12, 0, (3, 4), (4, 1))), "data/9' is missing"),
    (program(a=tensor("../x", "FloatStorage", 12, 0, (3, 4), (4, 1))), "badly"),
    (b"\x80\x02(" + text("a") + GOOD + b"u.", "damaged"),
    (program(a=GOOD)[:-1], "damaged"),
    (program(a=GOOD)[:30], "damaged"),
])  # fmt: skip
def test_any_other_pickle_is_refused(tmp_path, pickled, message):
    path = write(tmp_path / "a.pt", pickled, r0=NUMBERS.tobytes())
    with pytest.raises(ValueError, match="a.pt: ") as caught:
        read_tensors(path)
    assert message in str(caught.value)


def test_other_archives_are_refused(tmp_path):
    path = write(tmp_path / "a.pt", program(a=GOOD), zipfile.ZIP_DEFLATED, r0=NUMBERS.tobytes())
    with pytest.raises(ValueError, match="compressed"):
        read_tensors(path)
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match="a.pt"):
        read_tensors(path)
    with pytest.raises(ValueError, match="a.pt"):
        read_tensors(path.with_name("missing a.pt"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/other", b"")
    with pytest.raises(ValueError, match="no single data.pkl"):
        read_tensors(path)


def test_states_take_a_few_kilobytes_for_a_real_model(tmp_path):
    """30 layers of rank 8 beside SmolLM2-135M: 7,680 bytes of numbers."""
    from kvjax.cache.segments import ModelCache
    from kvjax.memory import MemoryState

    held = tuple(MemoryState(jnp.ones((1, 1, 8, 8))) for _ in range(30))
    cache = ModelCache((), {"beside": held}, jnp.zeros(1, jnp.int32), 1, None)
    memory.save_state(tmp_path / "s.safetensors", cache)
    assert (tmp_path / "s.safetensors").stat().st_size < 8192
