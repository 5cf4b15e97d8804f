import pytest
from ml_collections import ConfigDict

import kvjax
from experiments.transforms import build, entry_dtype, label, resolve


def cache(**fields) -> ConfigDict:
    return ConfigDict({"sink": 16, "tile": 64, **fields})


def test_nothing_chosen_is_the_exact_cache():
    resolved = resolve(ConfigDict({}))
    assert label(resolved) == "exact"
    assert build(resolved) is kvjax.cache()


def test_choices_and_their_defaults_are_spelled_out():
    encode = {"name": "kvarn", "key_bits": 4, "value_bits": None}
    resolved = resolve(cache(encode=encode, select={"name": "streaming", "recent": 512}))
    assert resolved.encode.key_bits == 4
    assert resolved.encode.value_bits == 2  # None takes the member's own default
    assert resolved.encode.tile == 64  # the cache's tile
    assert label(resolved) == "streaming-512+kvarn-k4v2"
    same = kvjax.cache(
        select=kvjax.select.streaming(recent=512),
        encode=kvjax.encode.kvarn(key_bits=4, value_bits=2, tile=64),
        sink=16,
    )
    assert build(resolved) is same


def test_the_dtype_of_exact_entries():
    assert entry_dtype(resolve(cache())) is None
    small = resolve(cache(dtype="bfloat16"))
    assert entry_dtype(small) == "bfloat16"
    assert label(small) == "exact-bfloat16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"encode": {"name": "int8", "key_bits": 2}}, r"encode\.key_bits=2: int8 takes tile; leave"),
     ({"encode": {"name": "kvarm"}}, r"encode\.name='kvarm': unknown; choose one of none, int8"),
     ({"encode": {"key_bits": 2}}, r"encode\.name=None: unknown"),
     ({"encode": {"name": "kvarn", "key_bits": "2"}}, r"encode\.key_bits='2': kvarn wants int"),
     ({"encode": {"name": "kvarn", "key_bits": True}}, r"encode\.key_bits=True: kvarn wants int"),
     ({"select": {"name": "streaming", "window": 3}}, r"select\.window=3: streaming takes sink"),
     ({"sink": -1}, r"sink=-1: expected an int of 0 or more"),
     ({"dtype": "float8"}, r"dtype='float8': choose one of model, float32"),
     ({"tile": 64.0}, r"tile=64\.0: expected an int"),
     ({"placement": {}}, r"placement: unknown; a cache is made of select, encode, place")],
)  # fmt: skip
def test_wrong_choices_name_field_and_remedy(fields, message):
    with pytest.raises(ValueError, match=r"config\.cache\." + message):
        resolve(cache(**fields))


@pytest.mark.parametrize(
    ("encode", "message"),
    [({"name": "kvarn", "key_bits": 7}, "key_bits=7"), ({"name": "rtn", "tile": 33}, "tile=33")],
)
def test_values_that_a_member_refuses(encode, message):
    with pytest.raises(ValueError, match=r"config\.cache\.encode .*" + message):
        build(resolve(cache(encode=encode)))
