"""Draws the figures of the documentation: ``python docs/figures/make.py [name ...]``.

Without a name it draws what comes from committed data, as ``make docs`` does, in less than a minute. The drawings of
`TRAINED` need models, which are trained first: ``make figures``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from style import own_fonts, save

SINGLE = {  # module and function of drawings of one figure, which is saved under the drawing's name
    "generation": ("generation", "generation"),
    "fox-lengths": ("generation", "fox_lengths"),
    "two-gpus": ("two_gpus", "two_gpus"),
    "forgotten-words": ("forgotten", "forgotten_words"),
    "token-loss": ("zoo", "token_loss"),
    "decay-profiles": ("zoo", "decay_profiles"),
    "lattice": ("lattice", "lattice"),
    "parts": ("parts", "parts"),
}


def drawn(*names: str) -> Callable[[], None]:
    """A function that draws figures of `SINGLE`."""

    def draw() -> None:
        for name in names:
            module, function = SINGLE[name]
            save(name, getattr(import_module(module), function))

    return draw


def called(module: str, function: str) -> Callable[[], None]:
    """A function of a module that draws or writes by itself."""
    return lambda: getattr(import_module(module), function)()


def draw_schematics() -> None:
    import readings
    import schematics
    import triangles

    for name, draw in (schematics.DRAWINGS | triangles.DRAWINGS | readings.DRAWINGS).items():
        save(name, draw)


def draw_fox() -> None:
    import fox
    import numpy as np
    from trained import cores, fox_config, heldout, model_of

    model = model_of(fox_config())
    layers = cores(model, heldout(512))
    decays, weights = [fox.log_decay(core) for core in layers], [fox.log_weights(core) for core in layers]
    save("gates", lambda theme: fox.maps(layers, decays, "decay $e^{d_{tj}}$", theme))
    save("attention", lambda theme: fox.maps(layers, weights, "attention weight $p_{tj}$", theme))
    save("kept-per-head", lambda theme: fox.kept_per_head(layers, theme))
    lengths = [256 << n for n in range(7)]
    shares = []
    for length in lengths:
        long = cores(model, heldout(length))
        shares.append({bound: np.concatenate([fox.kept(core, bound) for core in long]) for bound in fox.BOUNDS})
    save("kept-over-length", lambda theme: fox.kept_over_length(lengths, shares, theme))


def draw_path() -> None:
    import zoo
    from trained import cores, heldout, model_of, path_config

    layers = cores(model_of(path_config()), heldout(256))
    save("path-products", lambda theme: zoo.path_products(layers, zoo.extremes(layers), theme))


def draw_explored() -> None:
    from explored import explored
    from results import save as save_page_figure

    save_page_figure("explored", explored)


DRAWINGS: dict[str, Callable[[], None]] = {
    "lattice": drawn("lattice", "parts"),
    "schematics": draw_schematics,
    "fox": draw_fox,
    "card": called("card", "card"),
    "generation": drawn("generation", "fox-lengths"),
    "two-gpus": drawn("two-gpus"),
    "forgotten": drawn("forgotten-words"),
    "explored": draw_explored,
    "results": called("results", "results"),
    "tables": called("results", "tables"),
    "zoo": drawn("token-loss", "decay-profiles"),
    "path": draw_path,
}
TRAINED = ("fox", "path")


def main(names: list[str]) -> None:
    own_fonts()
    for name in names or [name for name in DRAWINGS if name not in TRAINED]:
        if name not in DRAWINGS:
            raise SystemExit(f"no drawing {name!r}: expected one of {', '.join(DRAWINGS)}")
        print(f"drawing {name}", flush=True)
        DRAWINGS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
