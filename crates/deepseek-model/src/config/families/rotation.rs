//! Keys of other families that say which channels rotate and how far.

use super::{
    Key,
    Neutral::{False, Name, Null, One, True, Zero},
};

pub(super) const KEYS: &[Key] = &[
    (False, "every layer rotates", &["mla_use_nope"]),
    (True, "every layer rotates", &["use_rope"]),
    (
        True,
        "neighbouring channels are a pair",
        &[
            "interleaved",
            "rope_interleave",
            "apply_rope_interleave",
            "apply_rope_interleaved",
            "rope_interleaving",
            "interleaved_rope",
            "use_interleaved_rope",
            "rotary_interleaved",
            "rotary_emb_interleaved",
            "indexer_rope_interleaved",
            "index_rope_interleaved",
            "rope_interleaved",
            "indexer_rope_interleave",
            "index_rope_interleave",
            "rope_traditional",
        ],
    ),
    (
        False,
        "neighbouring channels are a pair",
        &[
            "is_neox",
            "is_neox_style",
            "rope_neox",
            "rope_is_neox",
            "use_neox",
            "rope_is_neox_style",
            "use_neox_style",
            "neox_style",
            "use_neox_rotary_style",
            "indexer_is_neox_style",
        ],
    ),
    (
        Name(&["rope", "rotary"]),
        "nothing else is supported",
        &["position_embedding_type"],
    ),
    (
        Null,
        "every layer rotates",
        &["no_rope_layer_interval", "nope_layer_interval"],
    ),
    (
        Null,
        "all windows rotate by rope_theta",
        &["rope_local_base_freq", "local_rope_theta", "swa_rope_theta"],
    ),
    (
        One,
        "positions are not stretched so",
        &["rope_ratio", "rope_alpha", "ntk_alpha"],
    ),
    (
        False,
        "positions are not stretched so",
        &["use_dynamic_ntk", "dynamic_ntk"],
    ),
    (
        Null,
        "rope_scaling says how positions are stretched",
        &["rotary"],
    ),
    (
        Zero,
        "stretching leaves scores as they are",
        &["mscale", "mscale_all_dim"],
    ),
];
