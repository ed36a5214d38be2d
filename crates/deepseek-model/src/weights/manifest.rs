//! What a checkpoint of a given configuration holds, and where it goes.

use crate::config::{Config, LayerSchedule};

/// A tensor of [`super::Weights`].
#[derive(Debug)]
pub(super) struct Target {
    pub(super) name: String,
    /// Axis 0 and up, as documented at [`super::Weights`].
    pub(super) shape: Vec<usize>,
    /// In f32 whatever the dtype of matrices.
    pub(super) always_f32: bool,
    /// The stored tensors that make it up, one after the other, all of one shape.
    pub(super) parts: Vec<Part>,
}

impl Target {
    /// Whether it is made of matrices of routed experts.
    pub(super) fn is_of_experts(&self) -> bool {
        self.name.contains(".ffn.experts.")
    }
}

/// A tensor of the checkpoint.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: String,
    /// Shape of the values: `[n]` or `[rows, columns]`.
    pub(super) shape: Vec<usize>,
    /// Whether it may be stored in 8 or 4 bits, with scales beside it.
    pub(super) quantisable: bool,
}

/// An n-gram table of the checkpoint.
#[derive(Debug)]
pub(super) struct TablePart {
    pub(super) layer: usize,
    pub(super) part: Part,
}

/// Every tensor the decoder reads.
#[derive(Debug, Default)]
pub(super) struct Manifest {
    pub(super) targets: Vec<Target>,
    pub(super) tables: Vec<TablePart>,
}

/// How a tensor is stored and held.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Stored in 8 or 4 bits, or plain; held in the dtype of matrices.
    Quantisable,
    /// Stored plain; held in the dtype of matrices.
    Plain,
    /// Stored plain; held in f32.
    F32,
}

impl Manifest {
    pub(super) fn new(config: &Config) -> Self {
        let mut manifest = Self::default();
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        manifest.add("embed.weight", &[vocab, hidden], Kind::Plain);
        manifest.add("norm.weight", &[hidden], Kind::F32);
        manifest.add("head.weight", &[vocab, hidden], Kind::F32);
        for (index, layer) in config.layers.iter().enumerate() {
            let prefix = format!("layers.{index}");
            manifest.add_streams(&prefix, config);
            manifest.add_attention(&format!("{prefix}.attn"), config);
            manifest.add_compressed(&format!("{prefix}.attn"), index, layer, config);
            manifest.add_experts(&format!("{prefix}.ffn"), config);
            manifest.add_engram(&format!("{prefix}.engram"), index, layer, config);
        }
        manifest
    }

    fn add(&mut self, name: &str, shape: &[usize], kind: Kind) {
        let name = name.to_owned();
        self.targets.push(Target {
            name: name.clone(),
            shape: shape.into(),
            always_f32: kind == Kind::F32,
            parts: vec![Part {
                name,
                shape: shape.into(),
                quantisable: kind == Kind::Quantisable,
            }],
        });
    }

    /// Norms before the sublayers and the mixing of the residual streams.
    fn add_streams(&mut self, p: &str, config: &Config) {
        let (h, n) = (config.hidden_size, config.hc_mult);
        let mixes = (2 + n) * n;
        for site in ["attn", "ffn"] {
            self.add(&format!("{p}.{site}_norm.weight"), &[h], Kind::F32);
            self.add(&format!("{p}.hc_{site}_fn"), &[mixes, n * h], Kind::F32);
            self.add(&format!("{p}.hc_{site}_base"), &[mixes], Kind::F32);
            self.add(&format!("{p}.hc_{site}_scale"), &[3], Kind::F32);
        }
    }

    fn add_attention(&mut self, p: &str, config: &Config) {
        let (h, d, latent) = (config.hidden_size, config.head_dim, config.q_lora_rank);
        let (heads, grouped) = (config.num_heads * d, config.o_groups * config.o_lora_rank);
        self.add(&format!("{p}.wq_a.weight"), &[latent, h], Kind::Quantisable);
        self.add(&format!("{p}.q_norm.weight"), &[latent], Kind::F32);
        self.add(
            &format!("{p}.wq_b.weight"),
            &[heads, latent],
            Kind::Quantisable,
        );
        self.add(&format!("{p}.wkv.weight"), &[d, h], Kind::Quantisable);
        self.add(&format!("{p}.kv_norm.weight"), &[d], Kind::F32);
        self.add(&format!("{p}.attn_sink"), &[config.num_heads], Kind::F32);
        let wo_a = [grouped, heads / config.o_groups];
        self.add(&format!("{p}.wo_a.weight"), &wo_a, Kind::Quantisable);
        self.add(
            &format!("{p}.wo_b.weight"),
            &[h, grouped],
            Kind::Quantisable,
        );
    }

    /// The compressor of a KV source and the indexer of an index source.
    fn add_compressed(&mut self, p: &str, index: usize, layer: &LayerSchedule, config: &Config) {
        let (h, d, keys) = (config.hidden_size, config.head_dim, config.index_dim);
        if layer.kv_source == Some(index) {
            self.add(&format!("{p}.compressor.wkv.weight"), &[d, h], Kind::F32);
            if layer.ratio > 1 {
                self.add(&format!("{p}.compressor.wgate.weight"), &[d, h], Kind::F32);
            }
            self.add(&format!("{p}.compressor.norm.weight"), &[d], Kind::F32);
            self.add(&format!("{p}.indexer.wk.weight"), &[keys, d], Kind::Plain);
            self.add(&format!("{p}.indexer.k_norm.weight"), &[keys], Kind::F32);
        }
        if layer.index_source == Some(index) {
            let queries = [config.index_heads * keys, config.q_lora_rank];
            self.add(
                &format!("{p}.indexer.wq_b.weight"),
                &queries,
                Kind::Quantisable,
            );
            let weights = [config.index_heads, h];
            self.add(
                &format!("{p}.indexer.weights_proj.weight"),
                &weights,
                Kind::Plain,
            );
        }
    }

    /// The router, and experts stacked and fused: one matrix product per step instead of two, and
    /// one buffer per layer instead of three per expert.
    fn add_experts(&mut self, p: &str, config: &Config) {
        let (h, m, experts) = (
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
        );
        self.add(&format!("{p}.gate.weight"), &[experts, h], Kind::F32);
        self.add(&format!("{p}.gate.bias"), &[experts], Kind::F32);
        let routed: Vec<String> = (0..experts).map(|e| format!("{p}.experts.{e}")).collect();
        let shared = [format!("{p}.shared_experts")];
        self.add_stack(
            format!("{p}.experts.w13"),
            &[experts, 2 * m, h],
            &routed,
            &["w1", "w3"],
            [m, h],
        );
        self.add_stack(
            format!("{p}.experts.w2"),
            &[experts, h, m],
            &routed,
            &["w2"],
            [h, m],
        );
        self.add_stack(
            format!("{p}.shared_experts.w13"),
            &[2 * m, h],
            &shared,
            &["w1", "w3"],
            [m, h],
        );
        self.add_stack(
            format!("{p}.shared_experts.w2"),
            &[h, m],
            &shared,
            &["w2"],
            [h, m],
        );
    }

    fn add_stack(
        &mut self,
        name: String,
        shape: &[usize],
        experts: &[String],
        matrices: &[&str],
        matrix: [usize; 2],
    ) {
        let names = experts
            .iter()
            .flat_map(|e| matrices.iter().map(move |m| format!("{e}.{m}.weight")));
        let parts = names
            .map(|name| Part {
                name,
                shape: matrix.into(),
                quantisable: true,
            })
            .collect();
        self.targets.push(Target {
            name,
            shape: shape.into(),
            always_f32: false,
            parts,
        });
    }

    fn add_engram(&mut self, p: &str, index: usize, layer: &LayerSchedule, config: &Config) {
        let (Some(engram), Some(slot)) = (&config.engram, layer.engram) else {
            return;
        };
        let (h, n) = (config.hidden_size, config.hc_mult);
        let looked_up = engram.columns() * engram.head_dim;
        self.add(
            &format!("{p}.wkv.weight"),
            &[(n + 1) * h, looked_up],
            Kind::Quantisable,
        );
        self.add(&format!("{p}.q_weight"), &[n, h], Kind::F32);
        self.add(&format!("{p}.k_weight"), &[n, h], Kind::F32);
        let shape = vec![engram.table_rows[slot], engram.head_dim];
        let part = Part {
            name: format!("{p}.embed.weight"),
            shape,
            quantisable: true,
        };
        self.tables.push(TablePart { layer: index, part });
    }
}

/// Tensors of a released checkpoint that the text decoder does not use: the vision tower and what
/// joins it, the draft layers, and the routing bias of image tokens.
pub(super) fn is_skipped(name: &str) -> bool {
    const PREFIXES: [&str; 4] = ["vision.", "aligner.", "image_", "mtp."];
    let image_bias = || {
        let layer = name
            .strip_prefix("layers.")?
            .strip_suffix(".ffn.gate.bias_vl")?;
        layer.parse::<usize>().ok()
    };
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || image_bias().is_some()
}
