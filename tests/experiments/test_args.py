import pytest
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from experiments.args import check_types, node_at, parse_arg, with_overrides


@pytest.fixture
def config() -> ConfigDict:
    cache = {"bits": placeholder(int), "rate": 0.5, "on": False}
    return ConfigDict({"length": 8, "texts": ("a", "b"), "cache": cache, "name": "x"})


def test_parse_arg_by_the_types_of_its_defaults():
    parsed = parse_arg(
        "smoke,length=4096,rate=0.5,name=x", smoke=False, length=1, rate=1.0, name=""
    )
    assert parsed.to_dict() == {"smoke": True, "length": 4096, "rate": 0.5, "name": "x"}
    assert parse_arg(None, full=False).full is False
    assert parse_arg("full=false", full=True).full is False


@pytest.mark.parametrize(
    ("arg", "message"),
    [("smok", "'smok': unknown; it takes smoke, length"), ("length=x", "length=x: not an int"),
     ("smoke=2", "smoke=2: write smoke"), ("length", "length=true: not an int")],
)  # fmt: skip
def test_parse_arg_refuses(arg, message):
    with pytest.raises(ValueError, match=message):
        parse_arg(arg, smoke=False, length=1)


def test_overrides_leave_the_config_they_came_from(config):
    changed = with_overrides(config, {"cache.bits": 4, "length": 16})
    assert (changed.cache.bits, changed.length) == (4, 16)
    assert (config.cache.bits, config.length) == (None, 8)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [("cache.bit", 4, r"config\.cache\.bit: unknown; config\.cache has bits, on, rate"),
     ("length.x", 4, r"config\.length\.x: unknown; config\.length has no fields"),
     ("cache.bits", "four", r"config\.cache\.bits='four'"),
     ("length", 1.5, r"config\.length=1\.5")],
)  # fmt: skip
def test_overrides_name_the_field(config, path, value, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(config, {path: value})


def test_node_at(config):
    assert node_at(config, "cache.rate") == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [({"texts": ("a", 1)}, r"config\.texts\[1\]: expected a str, got an int 1"),
     ({"length": True}, r"config\.length: expected an int, got a bool True"),
     ({"texts": "a"}, r"config\.texts: expected a tuple"),
     ({"cache": 3}, r"config\.cache: expected a group of fields, got 3"),
     ({"cache": {"bits": 2, "rate": "x", "on": False}}, r"config\.cache\.rate: expected a float"),
     ({"more": 1}, r"config\.more: unknown; config has cache, length, name, texts")],
)  # fmt: skip
def test_check_types_names_the_field(config, change, message):
    wrong = ConfigDict(config.to_dict() | change)
    with pytest.raises(ValueError, match=message):
        check_types(wrong, config)


def test_check_types_wants_every_field_and_takes_an_int_for_a_float(config):
    right = ConfigDict(config.to_dict() | {"cache": {"bits": 2, "rate": 1, "on": True}})
    check_types(right, config)
    del right["name"]
    with pytest.raises(ValueError, match=r"config\.name: missing"):
        check_types(right, config)
