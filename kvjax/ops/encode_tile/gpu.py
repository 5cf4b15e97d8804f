"""Why there is no kernel for GPUs: XLA runs the reference there, fused into a few loops."""


def refusal() -> str:
    """The reason, for `kvjax.ops.dispatch.choose`."""
    return (
        "a tile's row and column statistics need the whole tile in one block's registers, both "
        "ways round, which Mosaic GPU cannot reduce; XLA compiles the reference there"
    )
