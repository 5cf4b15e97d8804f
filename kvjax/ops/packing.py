"""Codes of 1, 2, 3, 4 or 8 bits in int32 words, and pairs of 16-bit numbers in one int32.

Codes are packed along the second-minor axis ("rows"), never along the minor one: a TPU keeps the
minor axis on vector lanes, so unpacking is shifts and masks without any move between lanes. With W
words to a column, row ``j*4W + 4*r + byte`` sits in word ``r`` at bits ``8*byte + bits*j``. Every
byte of a word thus holds codes of neighbouring rows, which is what byte-wide (fp8, int8) unpacking
wants. Three bits are the 2-bit words of the low bits followed by the 1-bit words of the high bit.
Rows are padded with zeros up to a multiple of 32 / bits.
"""

import jax
import jax.numpy as jnp
from jax import lax

WIDTHS = (1, 2, 3, 4, 8)
META_DTYPES = ("float16", "bfloat16")


def check_bits(field: str, bits: int) -> None:
    """Raises ValueError, naming ``field``, unless codes of ``bits`` bits can be packed."""
    if bits not in WIDTHS:
        raise ValueError(f"{field}={bits!r} is not supported: choose one of {WIDTHS}")


def words(rows: int, bits: int) -> int:
    """Number of int32 words that ``rows`` codes of ``bits`` bits take, padding included."""
    if bits == 3:
        return words(rows, 2) + words(rows, 1)
    return -(-rows * bits // 32)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs integer codes [..., R, M], each in [0, 2**bits), into int32 words [..., W, M]."""
    check_bits("bits", bits)
    if bits == 3:
        low, high = codes & 3, codes >> 2
        return jnp.concatenate([pack(low, 2), pack(high, 1)], axis=-2)
    *lead, rows, minor = codes.shape
    num_words, planes = words(rows, bits), 8 // bits
    padding = [(0, 0)] * len(lead) + [(0, num_words * 32 // bits - rows), (0, 0)]
    planar = jnp.pad(codes.astype(jnp.uint32), padding)
    planar = planar.reshape(*lead, planes, num_words, 4, minor) << _shifts(bits)
    packed = planar.sum(axis=(-4, -2), dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)


def unpack(packed: jax.Array, bits: int, rows: int) -> jax.Array:
    """Inverse of :func:`pack`: int32 words [..., W, M] to int32 codes [..., rows, M]."""
    check_bits("bits", bits)
    if bits == 3:
        split = words(rows, 2)
        low = unpack(packed[..., :split, :], 2, rows)
        high = unpack(packed[..., split:, :], 1, rows)
        # Each in a loop of its own order: as one loop, the two orders cost six times the time.
        low, high = lax.optimization_barrier((low, high))
        return low | (high << 2)
    *lead, num_words, minor = packed.shape
    # The mask also drops the copies of the sign that the shift brings in.
    planar = packed[..., None, :, None, :] >> _shifts(bits).astype(jnp.int32)
    planar = planar & ((1 << bits) - 1)  # [..., planes, W, 4, M]
    return planar.reshape(*lead, num_words * 32 // bits, minor)[..., :rows, :]


def _shifts(bits: int) -> jax.Array:
    """Bit position of (plane, byte) in a word, shaped [planes, 1, 4, 1]."""
    plane = lax.broadcasted_iota(jnp.uint32, (8 // bits, 1, 4, 1), 0)
    byte = lax.broadcasted_iota(jnp.uint32, (8 // bits, 1, 4, 1), 2)
    return 8 * byte + bits * plane


def check_meta_dtype(meta_dtype: str) -> None:
    """Raises ValueError unless ``meta_dtype`` names a supported 16-bit float."""
    if meta_dtype not in META_DTYPES:
        raise ValueError(f"meta_dtype={meta_dtype!r} is not supported: choose one of {META_DTYPES}")


def pack_pair(high: jax.Array, low: jax.Array, meta_dtype: str) -> jax.Array:
    """Rounds two float32 arrays of one shape to 16 bits and stores them in one int32 each.

    What 16 bits cannot hold is clipped to the largest finite number: an infinite scale would turn
    every code 0 into NaN.
    """
    word = (_to_bits(high, meta_dtype) << 16) | _to_bits(low, meta_dtype)
    return lax.bitcast_convert_type(word, jnp.int32)


def unpack_pair(packed: jax.Array, meta_dtype: str) -> tuple[jax.Array, jax.Array]:
    """Inverse of :func:`pack_pair`: the high and the low half as float32."""
    word = lax.bitcast_convert_type(packed, jnp.uint32)
    return _from_bits(word >> 16, meta_dtype), _from_bits(word & 0xFFFF, meta_dtype)


def pack_halves(vector: jax.Array, meta_dtype: str) -> jax.Array:
    """[..., n] float32, n even, to [..., n/2] int32: element i above, element i + n/2 below."""
    high, low = jnp.split(vector, 2, axis=-1)
    return pack_pair(high, low, meta_dtype)


def unpack_halves(packed: jax.Array, meta_dtype: str) -> jax.Array:
    """Inverse of :func:`pack_halves`: [..., n/2] int32 to [..., n] float32."""
    return jnp.concatenate(unpack_pair(packed, meta_dtype), axis=-1)


def _to_bits(x: jax.Array, meta_dtype: str) -> jax.Array:
    limit = float(jnp.finfo(meta_dtype).max)
    half = jnp.clip(x, -limit, limit).astype(meta_dtype)
    return lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32)


def _from_bits(bits: jax.Array, meta_dtype: str) -> jax.Array:
    half = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.dtype(meta_dtype))
    return half.astype(jnp.float32)
