import pytest

from kvjax import encode


def test_every_member_is_built_by_name():
    assert encode.from_config("none") is None is encode.none()
    assert encode.from_config("int8", tile=64) == encode.int8(tile=64)
    assert encode.from_config("rtn", key_bits=3) == encode.rtn(key_bits=3)
    assert encode.from_config("kvarn", value_bits=4) == encode.kvarn(2, 4)
    assert encode.from_config("fp8", format="e5m2") == encode.fp8(format="e5m2")
    assert encode.from_config("int4", tile=64) == encode.int4(tile=64)
    assert encode.from_config("kivi", group=64) == encode.kivi(group=64)
    assert encode.from_config("kitty", share=0.25) == encode.kitty(share=0.25)
    product = encode.from_config("turboquant", product=True)
    assert product == encode.turboquant(product=True)
    assert encode.from_config("turboquant_nc", key_bits=3) == encode.turboquant_nc(3)
    assert encode.from_config("oscar", joint_norm=False) == encode.oscar(joint_norm=False)
    token = encode.from_config("hadamard_rtn", key_axis="token")
    assert token == encode.hadamard_rtn(key_axis="token")


def test_every_registered_name_is_a_public_function():
    assert encode.ENCODERS == {name: getattr(encode, name) for name in encode.ENCODERS}


def test_unknown_names_and_arguments_raise():
    with pytest.raises(ValueError, match=r"encode.name='zip' is unknown: .*'kvarn'"):
        encode.from_config("zip")
    with pytest.raises(ValueError, match=r"encode.key_bit is no argument of kvarn: .*key_bits"):
        encode.from_config("kvarn", key_bit=2)
    with pytest.raises(ValueError, match="encode.tile is no argument of none"):
        encode.from_config("none", tile=128)
