"""Tokens for training: the standard library's own source, text files, or files of tokens, one source or several."""

from typing import TYPE_CHECKING

from attnzoo.lazy import lazy

if TYPE_CHECKING:
    from attnzoo.data.sources import DOCUMENT_END, Data, build_data, decode, encode
    from attnzoo.data.windows import Mixture, TokenWindows, heldout_windows

__all__ = ["DOCUMENT_END", "Data", "Mixture", "TokenWindows", "build_data", "decode", "encode", "heldout_windows"]

__getattr__ = lazy(
    __name__,
    dict.fromkeys(("DOCUMENT_END", "Data", "build_data", "decode", "encode"), "sources")
    | dict.fromkeys(("Mixture", "TokenWindows", "heldout_windows"), "windows"),
)
