"""The pairs that are built in, a row each, and other names that the literature has."""

from attnzoo.registry.pair import Pair

# fmt: off
# the pairs whose products the others are
PAIRS = (
    Pair("linear_attention", "nope",     (),                           "0",                  "I"),
    Pair("retnet",           "alibi",    ("log_decay",),               "-slope_h",           "I"),
    Pair("mamba2",           "fox",      ("log_decay",),               "log sigmoid(w.x+b)", "I"),
    Pair("gla",              "wall",     ("log_diag",),                "0",                  "Diag(exp(a_t))",
         note="The literature pairs GLA with FoX by reducing its diagonal gate to a scalar; the exact dual is wall."),
    Pair("complex_linear",   "rope",     ("angle",),                   "0",                  "Rot(theta_t)"),
    Pair("deltanet",         "path",     ("w", "beta"),                "0",                  "I - beta_t w_t w_t^T"),
    Pair("gated_deltanet",   "path_fox", ("log_decay", "w", "beta"),   "log sigmoid(w.x+b)", "I - beta_t w_t w_t^T"),
)
# the other sets of parts; the last five have no file
PRODUCTS = (
    Pair("kda",                 "path_wall",            ("log_diag", "w", "beta")),
    Pair("mamba3",              "fox_rope",             ("log_decay", "angle")),
    Pair("gated_gla",           "gated_wall",           ("log_decay", "log_diag")),
    Pair("rope_deltanet",       "rope_path",            ("angle", "w", "beta")),
    Pair("rope_gated_deltanet", "rope_path_fox",        ("log_decay", "angle", "w", "beta")),
    Pair("rope_gla",            "rope_wall",            ("log_diag", "angle"),
         note="GLA behind selective RoPE (Movahedi et al., 2025, arXiv:2511.17388) decays the channels as turned, and "
              "is rope_gla where both channels of each turned pair decay alike."),
    Pair("rope_gated_gla",      "rope_gated_wall",      ("log_decay", "log_diag", "angle")),
    Pair("gated_kda",           "gated_path_wall",      ("log_decay", "log_diag", "w", "beta")),
    Pair("rope_kda",            "rope_path_wall",       ("log_diag", "angle", "w", "beta")),
    Pair("rope_gated_kda",      "rope_gated_path_wall", ("log_decay", "log_diag", "angle", "w", "beta")),
)
OBLIQUE = (  # erasing along one vector what is read along another: the factors may expand
    Pair("rwkv7", "rwkv7_path", ("log_diag", "w", "beta", "u"),
         note="Gated DeltaNet-2 has the same parts, with w = k and u = b k for a gate b per channel."),
)
# fmt: on
BUILT_IN = (*PAIRS, *PRODUCTS, *OBLIQUE)
OUTSIDE = "none of these pairs: docs/derivations/outside.md says why"
KNOWN_AS = {  # other names in the literature, and reductions
    "deltaproduct": "'deltanet' with num_householder=2 or more",
    "gated_deltaproduct": "'gated_deltanet' with num_householder=2 or more, the dual of 'path_fox' with as many",
    "selective_rope": "'rope' with gate='selective', and 'fox_rope' or another of its products by default",
    "kimi_linear": "'kda'",
    "hgrn2": "'gla' with block='hgrn2'",
    **dict.fromkeys(("nsa", "moba"), OUTSIDE),
    "comba": "'gated_deltanet' with query_correction=True",
    **dict.fromkeys(("gated_deltanet2", "gdn2"), "a gate of 'rwkv7' with w = k and u = b k"),
    "log_linear_attention": "'log_linear_mamba2', or 'log_linear_gated_deltanet'",
}
