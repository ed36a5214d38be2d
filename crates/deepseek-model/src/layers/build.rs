//! From loaded tensors to a layer.

use candle_core::Tensor;

use super::{
    DecoderLayer, Engram, attention::Attention, compressor::Compressor, indexer::Indexer, moe::Moe,
};
use crate::{
    Config,
    ops::{Experts, Linear, Mix},
    weights::{Weights, WeightsError},
};

type Taken<T> = Result<T, WeightsError>;

/// Takes tensors of one layer out of the loaded ones; the loader has checked that all are there.
struct LayerWeights<'a> {
    weights: &'a mut Weights,
    layer: usize,
}

impl LayerWeights<'_> {
    fn tensor(&mut self, name: &str) -> Taken<Tensor> {
        self.weights.take(&format!("layers.{}.{name}", self.layer))
    }

    fn linear(&mut self, name: &str) -> Taken<Linear> {
        self.tensor(name).map(Linear::new)
    }

    fn mix(&mut self, site: &str, config: &Config) -> Taken<Mix> {
        Ok(Mix {
            project: self.linear(&format!("hc_{site}_fn"))?,
            base: self.tensor(&format!("hc_{site}_base"))?,
            scale: self.tensor(&format!("hc_{site}_scale"))?,
            streams: config.hc_mult,
            iterations: config.hc_sinkhorn_iters,
            eps: config.hc_eps,
            norm_eps: config.rms_norm_eps,
        })
    }

    fn attention(&mut self, config: &Config) -> Taken<Attention> {
        let schedule = config.layers[self.layer];
        let is = |source: Option<usize>| source == Some(self.layer);
        let (kv_source, index_source) = (is(schedule.kv_source), is(schedule.index_source));
        Ok(Attention {
            wq_a: self.linear("attn.wq_a.weight")?,
            q_norm: self.tensor("attn.q_norm.weight")?,
            wq_b: self.linear("attn.wq_b.weight")?,
            wkv: self.linear("attn.wkv.weight")?,
            kv_norm: self.tensor("attn.kv_norm.weight")?,
            sink: self.tensor("attn.attn_sink")?,
            wo_a: self.tensor("attn.wo_a.weight")?,
            wo_b: self.linear("attn.wo_b.weight")?,
            compressor: kv_source
                .then(|| self.compressor(schedule.ratio))
                .transpose()?,
            indexer: index_source.then(|| self.indexer()).transpose()?,
        })
    }

    fn compressor(&mut self, ratio: usize) -> Taken<Compressor> {
        Ok(Compressor {
            wkv: self.linear("attn.compressor.wkv.weight")?,
            wgate: (ratio > 1)
                .then(|| self.linear("attn.compressor.wgate.weight"))
                .transpose()?,
            norm: self.tensor("attn.compressor.norm.weight")?,
            wk: self.linear("attn.indexer.wk.weight")?,
            k_norm: self.tensor("attn.indexer.k_norm.weight")?,
        })
    }

    fn indexer(&mut self) -> Taken<Indexer> {
        Ok(Indexer {
            wq_b: self.linear("attn.indexer.wq_b.weight")?,
            weights_proj: self.linear("attn.indexer.weights_proj.weight")?,
        })
    }

    fn moe(&mut self, config: &Config) -> Taken<Moe> {
        Ok(Moe {
            gate: self.linear("ffn.gate.weight")?,
            bias: self.tensor("ffn.gate.bias")?,
            experts: Experts {
                w13: self.tensor("ffn.experts.w13")?,
                w2: self.tensor("ffn.experts.w2")?,
                limit: config.swiglu_limit,
            },
            shared_w13: self.linear("ffn.shared_experts.w13")?,
            shared_w2: self.linear("ffn.shared_experts.w2")?,
        })
    }

    fn engram(&mut self) -> Taken<Engram> {
        Ok(Engram {
            table: self.weights.take_table(self.layer)?,
            wkv: self.linear("engram.wkv.weight")?,
            q_weight: self.tensor("engram.q_weight")?,
            k_weight: self.tensor("engram.k_weight")?,
        })
    }
}

impl DecoderLayer {
    /// Takes layer `index` out of `weights`.
    pub(crate) fn new(weights: &mut Weights, config: &Config, index: usize) -> Taken<Self> {
        let mut take = LayerWeights {
            weights,
            layer: index,
        };
        Ok(Self {
            index,
            engram: config.layers[index]
                .engram
                .map(|_| take.engram())
                .transpose()?,
            attn_norm: take.tensor("attn_norm.weight")?,
            attn_mix: take.mix("attn", config)?,
            attention: take.attention(config)?,
            ffn_norm: take.tensor("ffn_norm.weight")?,
            ffn_mix: take.mix("ffn", config)?,
            moe: take.moe(config)?,
        })
    }
}
