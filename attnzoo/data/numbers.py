"""Files of tokens written by other programs: `.npy`, and `.bin` with or without a header."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attnzoo.data.windows import Tokens

# github.com/karpathy/llm.c, dev/data/data_common.py, which modded-nanogpt follows: magic number and version ->
# dtype; the third of the header's 256 int32 is the number of tokens.
HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
HEADER = 256 * 4  # bytes
WIDER = {"uint8": ("uint32", "uint16"), "uint16": ("int64", "uint32"), "uint32": ("int64",), "int32": ("int64",)}
SAMPLE = 2**16  # tokens


def read_numbers(path: Path, dtype: str, vocab_size: int | None) -> Tokens:
    """The tokens of a file, as a memory map.

    Args:
        path: a `.npy` or a `.bin` file.
        dtype: the dtype of a `.bin` file.
        vocab_size: tokens are below it; None where it is unknown.

    Raises:
        ValueError: the file is empty, holds no such numbers, or numbers of another dtype; or `dtype` holds fewer
            tokens than the vocabulary has.
    """
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"no data in {str(path)!r}: the file is empty")
    if path.suffix != ".bin":
        return _read_npy(path)
    offset = _header(path, dtype)
    if (size - offset) % np.dtype(dtype).itemsize:
        raise ValueError(f"{str(path)!r} is not a whole number of {dtype} tokens: {size - offset} bytes")
    tokens = np.memmap(path, dtype=dtype, mode="r", offset=offset)
    for wider in WIDER.get(dtype, ()):
        if _is_of(tokens, wider, vocab_size or 1):
            raise ValueError(f"{str(path)!r}: data.dtype={dtype!r} makes every other token 0: take data.dtype={wider}")
    if vocab_size is not None and vocab_size - 1 > np.iinfo(dtype).max:  # two of them may be one token, or some wrapped
        raise ValueError(
            f"{str(path)!r}: data.dtype={dtype!r} holds tokens up to {np.iinfo(dtype).max}, and data.vocab_size="
            f"{vocab_size} says more: take the dtype that the file was written in, or fewer"
        )
    return tokens


def _header(path: Path, dtype: str) -> int:
    """The bytes of a file's header, which is checked against the file; 0 without a header."""
    with open(path, "rb") as file:
        start = file.read(HEADER)
    if len(start) < HEADER:
        return 0
    magic, version, tokens = map(int, np.frombuffer(start, dtype="<i4")[:3])
    versions = {version: found for (known, version), found in HEADERS.items() if known == magic}
    if not versions:
        return 0
    said = f"{str(path)!r} begins with the header of an llm.c file"
    if version not in versions:
        raise ValueError(f"{said}: expected version {' or '.join(map(str, versions))}, got {version}")
    if dtype != versions[version]:
        raise ValueError(f"{said} of {versions[version]} tokens: take data.dtype={versions[version]}, not {dtype}")
    whole = HEADER + tokens * np.dtype(dtype).itemsize
    if path.stat().st_size != whole:
        raise ValueError(f"{said}: expected the {whole} bytes of its {tokens} tokens, got {path.stat().st_size}")
    return HEADER


def _is_of(tokens: Tokens, wider: str, vocab_size: int) -> bool:
    """Whether the numbers look like the parts of tokens of a ``wider`` dtype: every upper part fits the vocabulary."""
    narrow, times = tokens.dtype.itemsize, np.dtype(wider).itemsize // tokens.dtype.itemsize
    sample = tokens[: min(SAMPLE, len(tokens)) // times * times].reshape(-1, times)
    limits = np.array([(vocab_size - 1) >> 8 * narrow * place for place in range(1, times)])
    if len(sample) < 32 or len(tokens) % times:
        return False
    return bool((sample[:, 1:] <= limits).all() and sample[:, 0].max() > max(limits[-1], 1))


def _read_npy(path: Path) -> Tokens:
    try:
        shard = np.lib.format.open_memmap(path, mode="r")  # np.load would also open archives
    except OSError:
        raise
    except Exception as error:  # many kinds, since the header is parsed as Python
        raise ValueError(f"{str(path)!r} is not a .npy file of integers: {error}") from error
    if shard.ndim != 1 or not np.issubdtype(shard.dtype, np.integer):
        raise ValueError(f"{str(path)!r}: expected a 1-D integer array, got {shard.dtype} of shape {shard.shape}")
    if shard.offset + shard.nbytes != path.stat().st_size:
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size} bytes where its header says {shard.offset + shard.nbytes}"
        )
    return shard
