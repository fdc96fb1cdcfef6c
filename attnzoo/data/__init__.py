"""Tokens for training: the standard library's own source, text files, or pre-tokenised files."""

from attnzoo.data.sources import DOCUMENT_END, Data, build_data, decode, encode
from attnzoo.data.windows import TokenWindows, heldout_windows

__all__ = ["DOCUMENT_END", "Data", "TokenWindows", "build_data", "decode", "encode", "heldout_windows"]
