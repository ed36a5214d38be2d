//! Keys of other families that say which experts there are, how they are chosen and what they compute.

use super::{
    Key,
    Neutral::{Empty, False, Name, Null, One, True, Zero},
};

pub(super) const KEYS: &[Key] = &[
    (
        One,
        "experts are in no groups",
        &[
            "n_group",
            "topk_group",
            "num_expert_group",
            "n_expert_groups",
            "n_limited_groups",
            "moe_router_num_groups",
            "moe_router_group_topk",
        ],
    ),
    (False, "experts are in no groups", &["use_grouped_topk"]),
    (
        One,
        "nothing else is supported",
        &[
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
        ],
    ),
    (
        One,
        "every layer has experts",
        &[
            "decoder_sparse_step",
            "interleave_moe_layer_step",
            "moe_layer_interval",
            "moe_layer_frequency",
        ],
    ),
    (
        Zero,
        "every layer has experts",
        &[
            "first_k_dense_replace",
            "num_dense_layers",
            "moe_layer_start_index",
            "moe_layer_num_skipped",
        ],
    ),
    (
        Null,
        "every layer has experts",
        &[
            "moe_layers",
            "moe_layers_enum",
            "moe_layer_end_index",
            "expert_layer_period",
            "expert_layer_offset",
        ],
    ),
    (
        True,
        "experts are chosen by scores with biases",
        &[
            "use_routing_bias",
            "use_correction_bias",
            "moe_use_aux_free",
            "use_moe_router_bias",
            "moe_router_enable_expert_bias",
        ],
    ),
    (Zero, "every expert computes", &["zero_expert_num"]),
    (Empty, "every layer has experts", &["mlp_only_layers"]),
    (
        Zero,
        "no layer routes by token id",
        &["n_hash_layers", "num_hash_layers"],
    ),
    (One, "router logits are not divided", &["gate_temp"]),
    (
        False,
        "experts' outputs are weighted",
        &[
            "apply_router_weight_on_input",
            "moe_apply_router_weight_on_input",
        ],
    ),
    (
        False,
        "the shared expert has no gate",
        &["shared_expert_gate", "use_shared_expert_gate"],
    ),
    (One, "experts gate by silu", &["swiglu_alpha"]),
    (
        Name(&["noaux_tc"]),
        "nothing else is supported",
        &["topk_method"],
    ),
];
