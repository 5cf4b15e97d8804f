"""Which implementation runs where nobody asks for one."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from kvjax.ops import dispatch

KERNELS = {"tpu": lambda: ""}
MESH = AbstractMesh((2, 2), ("data", "model"))
ROWS = PartitionSpec("data")


@pytest.fixture(autouse=True)
def tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def chosen(shape, derive=lambda x: x, implementation=None):
    """What is chosen for an array derived from one of `shape` while that is traced."""
    found = []

    def run(x):
        y = derive(x)
        found.append(dispatch.choose("op", implementation, KERNELS, {"x": y, "bias": None}))
        return y

    jax.eval_shape(run, shape)
    return found[0]


def on(mesh, spec=ROWS):
    return jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh, spec))


def test_the_kernel_where_it_takes_the_arguments():
    alone = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert chosen(alone) == "tpu"
    assert chosen(on(AbstractMesh((1,), ("data",)))) == "tpu"
    assert dispatch.choose("op", None, {"tpu": lambda: "too large"}) == "reference"
    assert dispatch.choose("op", None, {"gpu": lambda: ""}) == "reference"


def test_the_reference_where_the_compiler_splits_arrays_over_devices():
    assert chosen(on(MESH)) == "reference"
    assert chosen(on(MESH, PartitionSpec()), lambda x: jnp.ones((4, 4)) @ x[0]) == "reference"
    assert chosen(on(MESH), implementation="tpu") == "tpu"


def test_the_reference_under_a_mesh_in_context():
    with jax.sharding.use_abstract_mesh(MESH):
        assert chosen(jax.ShapeDtypeStruct((4, 4), jnp.float32)) == "reference"


@pytest.mark.parametrize(("axes", "wanted"), [(("data", "model"), "tpu"), (("data",), "reference")])
def test_kernels_run_inside_shard_map_over_all_axes(axes, wanted):
    found = []

    def run(x):
        found.append(dispatch.choose("op", None, KERNELS, x))
        return x

    mapped = jax.shard_map(run, mesh=MESH, in_specs=ROWS, out_specs=ROWS, axis_names=set(axes))
    jax.eval_shape(mapped, on(MESH))
    assert found == [wanted]
